// The rows of a step, and how the work of attention on them is cut into tasks.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "kv.h"

namespace conch {

// The rows of a step; born in Python (conch_kernels.cpu_attention.Rows, the same fields in the same order). Row r
// owns tokens [cu_query[r], cu_query[r + 1]), the last ones of its sequence of seq_lens[r] tokens.
struct Rows {
    const int32_t* cu_query;      // [rows + 1]
    const int32_t* seq_lens;      // [rows]
    const int32_t* block_tables;  // [rows][stride]
    const int64_t* slots;         // [tokens]: block * block size + offset
    const int64_t* positions;     // [tokens]
    int32_t rows;
    int32_t tokens;
    int32_t stride;
    int32_t reserved;
};

// Some queries of one row and some heads that share a KV head, which see keys of [begin, end), counted in lanes.
struct Task {
    const int32_t* table;  // the row's blocks
    int32_t token;         // first query
    int32_t queries;
    int32_t position;      // of the first query
    int32_t head;          // first head
    int32_t heads;
    int32_t begin, end;
    int32_t split;         // which of the plan's splits this is a part of, or NONE
    int32_t part;          // which part
    int64_t cost;

    static constexpr int NONE = -1;
    int rows() const { return queries * heads; }
};

// The parts of a task whose keys are shared out: the member that finishes the last one merges them all.
struct Split {
    std::atomic<int> left;
    int32_t parts;
    ptrdiff_t where;  // of the first part's sums among the plan's
};

// What each layer with the same sliding window does in a step. Made by one thread, used by all of a team.
class AttentionPlan {
   public:
    static constexpr int TILE_ROWS = 48;

    // heads: query heads; window: tokens that a query sees, itself included, 0 for all before it.
    AttentionPlan(const Rows& rows, const KvLayout& layout, int heads, int window, int members);

    const KvLayout layout;
    const int heads;
    const int window;

    const std::vector<Task>& tasks() const { return tasks_; }
    Split& split(const Task& task) const { return splits_[task.split]; }

    // Room of one part: for each row of the tile its sums, then its maximum and weight.
    ptrdiff_t part_floats(const Task& task) const { return ptrdiff_t(task.rows()) * (value_lanes() + 2); }
    float* part(const Task& task, int part) const {
        return parts_.get() + split(task).where + part * part_floats(task);
    }
    int value_lanes() const { return round_up(layout.value_size, LANES); }

   private:
    void add_row(const Rows& rows, int row);
    void share_out_keys(int members);
    int lane_of(int position) const {
        return position / layout.block_size * layout.lanes() + position % layout.block_size;
    }

    std::vector<Task> tasks_;
    std::unique_ptr<Split[]> splits_;
    std::unique_ptr<float[]> parts_;
};

}  // namespace conch
