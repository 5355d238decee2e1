// The KV that a layer will read, fetched while the products before it compute.
//
// Attention of decodes waits for memory, and products of more than a few rows leave memory idle. So each member goes
// through its share of the blocks, and a product's inner loop touches a line of them now and then. What does not stay
// in its own caches is found in the one that all cores share.
#pragma once

#include <vector>

#include "attention_plan.h"

namespace conch {

class KvAhead {
   public:
    static constexpr int PIECE = 2048;
    static constexpr int LINES = PIECE / 64;

    // Lists every `members`-th block of the rows, from the given one on; a block that rows share is listed once where
    // it is at the same place of neighbours' tables. Layers see `window` tokens at most, 0 for all.
    void list(const Rows& rows, const KvLayout& layout, size_t element_bytes, int window, int member, int members) {
        bytes_ = layout.block_elements() * element_bytes;
        blocks_.clear();
        const size_t most = MOST / members / (2 * bytes_) + 1;
        int turn = 0;
        for (int row = 0; row < rows.rows; row++) {
            const int32_t* table = rows.block_tables + ptrdiff_t(row) * rows.stride;
            const int first = window ? std::max(0, rows.seq_lens[row] - window) / layout.block_size : 0;
            for (int i = first; i < ceil_div(rows.seq_lens[row], layout.block_size); i++) {
                if (row && table[i] == table[i - rows.stride]) continue;
                if (turn++ % members != member) continue;
                if (blocks_.size() == most) return;
                blocks_.push_back(table[i]);
            }
        }
    }

    // From here on the blocks are fetched from a layer's pool.
    void aim(const Pool& pool) {
        halves_[0] = static_cast<const char*>(pool.keys);
        halves_[1] = static_cast<const char*>(pool.values);
        next_ = half_ = 0;
        offset_ = 0;
    }

    // Nothing is to be fetched.
    void rest() { next_ = blocks_.size(); }

    // The LINES lines to fetch next; when all are, the same ones again and again, which costs nothing.
    const char* piece() {
        alignas(64) static const char NOTHING[PIECE] = {};
        if (next_ == blocks_.size()) return NOTHING;
        const char* at = halves_[half_] + blocks_[next_] * bytes_ + offset_;
        if ((offset_ += PIECE) >= bytes_) {
            offset_ = 0;
            if (half_) next_++;
            half_ = !half_;
        }
        return at;
    }

   private:
    static constexpr size_t MOST = 12 << 20;  // of a layer: what the shared cache can be trusted to keep

    std::vector<int32_t> blocks_;
    const char* halves_[2] = {};
    ptrdiff_t bytes_ = 0, offset_ = 0;
    size_t next_ = 0;
    bool half_ = false;
};

}  // namespace conch
