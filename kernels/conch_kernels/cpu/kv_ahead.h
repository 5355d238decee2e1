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

    // Lists the blocks that a member's share of the decodes reads. The heads of a row share them, and so may rows that
    // follow each other: such blocks are listed once where they are at the same place of both tables.
    void list(const AttentionPlan& plan, size_t element_bytes, int member) {
        const KvLayout& layout = plan.layout;
        bytes_ = layout.block_elements() * element_bytes;
        blocks_.clear();
        const size_t most = MOST / (plan.shares().size() - 1) / (2 * bytes_) + 1;
        const int32_t *table = nullptr, *table_before = nullptr;
        int head = 0;
        for (int item = plan.shares()[member]; item < plan.shares()[member + 1]; item++) {
            const Task& task = plan.tasks()[item];
            if (task.rows() > AttentionPlan::FEW_ROWS) continue;  // these compute longer than they would wait
            if (task.table != table) {
                table_before = table;
                table = task.table;
                head = task.head;
            }
            if (task.head != head) continue;
            const int end = std::min(ceil_div(task.end, layout.lanes()), ceil_div(task.position, layout.block_size));
            for (int i = task.begin / layout.lanes(); i < end; i++) {
                if (table_before && table_before[i] == table[i]) continue;
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
