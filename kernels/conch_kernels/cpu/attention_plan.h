// The rows of a step, and how the work of attention on them is cut into tasks.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "kv.h"

namespace conch {

// The rows of a step; born in Python (conch_kernels.cpu_attention.NativeRows, the same fields in the same order). Row r
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

// Some queries of one row and some heads that share a KV head, and the lanes [begin, end) of the row's keys, which
// are all that they see or a part of it.
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

    static constexpr int NONE = -1;
    int rows() const { return queries * heads; }
    // What it takes, in no unit: reading a key costs about as much as a tile of 16 rows computes with it.
    int64_t cost() const { return int64_t(end - begin) * (16 + rows()); }
};

// A task whose keys are shared out: the member that finishes the last part merges them all.
struct Split {
    std::atomic<int> left;
    int32_t parts;
    ptrdiff_t where;  // of the first part's results
};

// What each layer with the same sliding window does in a step. Made by one thread, used by all of a team, for one
// layer at a time.
class AttentionPlan {
   public:
    static constexpr int TILE_ROWS = 48;
    static constexpr int FEW_ROWS = 16;           // tiles up to this size wait for memory:
    static constexpr int PART_LANES = 512;        // their keys are shared out in smaller parts
    static constexpr int TILE_PART_LANES = 2048;  // than those of larger ones

    // heads: query heads; window: tokens that a query sees, itself included, 0 for all before it; members: of the team
    // that will do it. The arrays that `rows` points to outlive the plan.
    AttentionPlan(const Rows& rows, const KvLayout& layout, int heads, int window, int members);

    const KvLayout layout;
    const int heads;
    const int window;

    // Member m's are [shares()[m], shares()[m + 1]): neighbouring rows, so that what it has fetched of their KV is in
    // its own caches. Those that take longest come first.
    const std::vector<Task>& tasks() const { return tasks_; }
    const std::vector<int>& shares() const { return shares_; }

    int value_lanes() const { return round_up(layout.value_size, LANES); }
    int lane_of(int position) const {
        return position / layout.block_size * layout.lanes() + position % layout.block_size;
    }
    Split& split(const Task& task) const { return splits_[task.split]; }

    // What a part results in: for each row of the tile its sums, then all rows' maxima, then their totals.
    float* part(const Task& task, int part) const {
        return parts_.get() + split(task).where + part * part_floats(task);
    }

   private:
    void add_row(const Rows& rows, int row);
    void share_out_keys();
    void deal(int members);
    ptrdiff_t part_floats(const Task& task) const { return ptrdiff_t(task.rows()) * (value_lanes() + 2); }

    std::vector<Task> tasks_;
    std::vector<int> shares_;
    std::unique_ptr<Split[]> splits_;
    std::unique_ptr<float[]> parts_;
};

// The plans of one step, one for each window that its layers have.
class AttentionPlans {
   public:
    AttentionPlans(const Rows& rows, const KvLayout& layout, int heads, int members)
        : rows_(rows), layout_(layout), heads_(heads), members_(members) {}

    // Makes the plan where it is missing: to be called by one thread.
    const AttentionPlan& prepare(int window) {
        return plans_.try_emplace(window, rows_, layout_, heads_, window, members_).first->second;
    }
    const Rows& rows() const { return rows_; }

   private:
    Rows rows_;
    KvLayout layout_;
    int heads_, members_;
    std::map<int, AttentionPlan> plans_;
};

}  // namespace conch
