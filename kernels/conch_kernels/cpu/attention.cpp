// Plans of attention, and attention as an operation of its own (conch_kernels.cpu_attention).
#include "attention.h"

#include <algorithm>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace conch {

AttentionPlan::AttentionPlan(const Rows& rows, const KvLayout& layout, int heads, int window, int members)
    : layout(layout), heads(heads), window(window) {
    for (int row = 0; row < rows.rows; row++) add_row(rows, row);
    share_out_keys();
    deal(members);
}

// Cuts a row into tiles of TILE_ROWS pairs of a query and a head. The heads of a group share what is read of KV.
void AttentionPlan::add_row(const Rows& rows, int row) {
    const int first = rows.cu_query[row], count = rows.cu_query[row + 1] - first;
    const int start = rows.seq_lens[row] - count, group = heads / layout.heads;
    const int tile_heads = ceil_div(group, ceil_div(group, TILE_ROWS));
    const int tiles = ceil_div(count, std::max(1, TILE_ROWS / tile_heads));
    for (int tile = 0; tile < tiles; tile++) {
        const int query = int(int64_t(count) * tile / tiles), next = int(int64_t(count) * (tile + 1) / tiles);
        const int unseen = window ? std::max(0, start + query - window + 1) : 0;
        Task task = {};
        task.table = rows.block_tables + ptrdiff_t(row) * rows.stride;
        task.token = first + query;
        task.queries = next - query;
        task.position = start + query;
        task.begin = lane_of(unseen) / LANES * LANES;
        task.end = lane_of(start + next - 1) + 1;
        task.split = Task::NONE;
        for (int kv_head = 0; kv_head < layout.heads; kv_head++)
            for (int head = 0; head < group; head += tile_heads) {
                task.head = kv_head * group + head;
                task.heads = std::min(tile_heads, group - head);
                tasks_.push_back(task);
            }
    }
}

// Shares out the keys of long tasks, so that no member waits long for another. How depends on nothing but the task:
// whatever else is in the step, and whoever computes it, a row is summed in the same order.
void AttentionPlan::share_out_keys() {
    std::vector<Task> whole;
    whole.swap(tasks_);
    std::vector<int32_t> parts_of;
    std::vector<ptrdiff_t> where;
    ptrdiff_t floats = 0;
    for (Task& task : whole) {
        const int lanes = task.end - task.begin;
        const int each = task.rows() <= FEW_ROWS ? PART_LANES : TILE_PART_LANES, parts = ceil_div(lanes, each);
        if (parts > 1) {
            task.split = int(parts_of.size());
            parts_of.push_back(parts);
            where.push_back(floats);
            floats += parts * part_floats(task);
        }
        for (int part = 0; part < parts; part++) {
            Task one = task;
            one.part = part;
            one.begin = task.begin + part * each;
            one.end = std::min(task.end, one.begin + each);
            tasks_.push_back(one);
        }
    }
    splits_ = std::make_unique<Split[]>(parts_of.size());
    for (size_t i = 0; i < parts_of.size(); i++) {
        splits_[i].left = splits_[i].parts = parts_of[i];
        splits_[i].where = where[i];
    }
    parts_.reset(new float[floats]);
}

// Cuts the tasks, which are in the order of their rows, into shares of equal cost.
void AttentionPlan::deal(int members) {
    int64_t total = 0, before = 0;
    for (const Task& task : tasks_) total += task.cost();
    shares_.assign(1, 0);
    for (int i = 0; i < int(tasks_.size()); i++) {
        const int64_t middle = before + tasks_[i].cost() / 2;
        while (middle * members >= total * int64_t(shares_.size())) shares_.push_back(i);
        before += tasks_[i].cost();
    }
    shares_.resize(members + 1, int(tasks_.size()));
    for (int member = 0; member < members; member++)
        std::stable_sort(tasks_.begin() + shares_[member], tasks_.begin() + shares_[member + 1],
                         [](const Task& a, const Task& b) { return a.cost() > b.cost(); });
}

namespace {

// KV kept as elements of what is computed with, or as int8.
template <class E, class Stored>
class KvKeptAs : public KvCache<E> {
   public:
    void write(const KvLayout& layout, const Pool& pool, int64_t slot, const float* keys,
               const float* values) const override {
        for (int head = 0; head < layout.heads; head++)
            write_kv(layout, static_cast<Stored*>(pool.keys), static_cast<Stored*>(pool.values), slot, head,
                     keys + head * layout.key_size, values + head * layout.value_size);
    }

    void attend(Crew all, const AttentionPlan& plan, const AttentionConstants& constants, const Pool& pool,
                Heads<E> query, E* out, AttentionScratch& scratch) const override {
        const std::vector<Task>& tasks = plan.tasks();
        const int count = int(tasks.size());
        const auto *keys = static_cast<const Stored*>(pool.keys), *values = static_cast<const Stored*>(pool.values);
        scratch.fit<E, Stored>(plan);
        all.team.each_of(all.member, plan.shares().data(), [&](int item) {
            const Task& next = tasks[std::min(item + 1, count - 1)];
            Tile<E, Stored>(plan, tasks[item], constants, keys, values, scratch).go(query, next, out);
        });
    }
};

}  // namespace

template <class E>
const KvCache<E>& kv_cache(const KvLayout& layout) {
    static const KvKeptAs<E, E> plain;
    static const KvKeptAs<E, int8_t> int8;
    if (layout.is_int8) return int8;
    return plain;
}
template const KvCache<float>& kv_cache(const KvLayout&);
template const KvCache<bf16>& kv_cache(const KvLayout&);

// A team's memory for attention as an operation of its own.
struct AttentionOp {
    explicit AttentionOp(Team& team) : team(team), scratches(new AttentionScratch[team.size()]) {}

    Team& team;
    std::unique_ptr<AttentionScratch[]> scratches;
};

// One layer's attention; born in Python (conch_kernels.cpu_attention._Call). Strides are in elements.
struct AttentionCall {
    const void *query, *key, *value;
    int64_t query_token, query_head, key_token, key_head, value_token, value_head;
    Pool pool;
    void* out;  // [tokens][heads][value size]
    AttentionConstants constants;
    int32_t window;
    int32_t is_bf16;
};

namespace {

template <class E>
void write_token(const KvLayout& layout, const AttentionCall& call, int64_t slot, int token, float* room) {
    const Heads<E> keys = {static_cast<const E*>(call.key), call.key_token, call.key_head};
    const Heads<E> values = {static_cast<const E*>(call.value), call.value_token, call.value_head};
    float *wide_keys = room, *wide_values = room + layout.heads * layout.key_size;
    for (int head = 0; head < layout.heads; head++) {
        const E *key = keys.at(token, head), *value = values.at(token, head);
        for (int d = 0; d < layout.key_size; d++) wide_keys[head * layout.key_size + d] = to_float(key[d]);
        for (int d = 0; d < layout.value_size; d++) wide_values[head * layout.value_size + d] = to_float(value[d]);
    }
    kv_cache<E>(layout).write(layout, call.pool, slot, wide_keys, wide_values);
}

template <class E>
void run(AttentionOp& op, AttentionPlans& plans, const AttentionCall& call) {
    const AttentionPlan& plan = plans.prepare(call.window);
    const Rows& rows = plans.rows();
    const int some = rows.tokens < 64 ? 1 : LANES;
    op.team.run([&](int member) {
        std::vector<float> room(plan.layout.heads * (plan.layout.key_size + plan.layout.value_size));
        op.team.each(ceil_div(rows.tokens, some), [&](int item) {
            for (int token = item * some; token < std::min(rows.tokens, (item + 1) * some); token++)
                write_token<E>(plan.layout, call, rows.slots[token], token, room.data());
        });
        const Heads<E> query = {static_cast<const E*>(call.query), call.query_token, call.query_head};
        kv_cache<E>(plan.layout)
            .attend(Crew{op.team, member}, plan, call.constants, call.pool, query, static_cast<E*>(call.out),
                    op.scratches[member]);
    });
}

}  // namespace
}  // namespace conch

using namespace conch;

// Sizes of the structures that Python mirrors, so that it can tell when it does not.
EXPORT void conch_attention_sizes(int64_t* sizes) {
    const int64_t all[] = {sizeof(KvLayout), sizeof(Rows), sizeof(AttentionConstants), sizeof(AttentionCall)};
    std::copy(std::begin(all), std::end(all), sizes);
}

EXPORT AttentionOp* conch_attention_new(Team* team) { return new AttentionOp(*team); }

EXPORT void conch_attention_free(AttentionOp* op) { delete op; }

EXPORT AttentionPlans* conch_attention_plans_new(const AttentionOp* op, const Rows* rows, const KvLayout* layout,
                                                 int heads) {
    return new AttentionPlans(*rows, *layout, heads, op->team.size());
}

EXPORT void conch_attention_plans_free(AttentionPlans* plans) { delete plans; }

// How many tasks the layers with this window have, and how many of them are parts of a split.
EXPORT void conch_attention_tasks(AttentionPlans* plans, int window, int* tasks, int* parts) {
    const AttentionPlan& plan = plans->prepare(window);
    *tasks = int(plan.tasks().size());
    *parts = int(std::count_if(plan.tasks().begin(), plan.tasks().end(),
                               [](const Task& task) { return task.split != Task::NONE; }));
}

EXPORT void conch_attention_run(AttentionOp* op, AttentionPlans* plans, const AttentionCall* call) {
    if (call->is_bf16)
        run<bf16>(*op, *plans, *call);
    else
        run<float>(*op, *plans, *call);
}
