// One task of attention: a tile of queries goes through its keys chunk by chunk, with an online softmax.
//
// All scores are kept in powers of two: weights are 2^(score - largest so far). What a query must not see gets a
// score of NOTHING, by selection, because it may be NaN; a row that has seen nothing else yet weighs that as if
// it were something, and forgets it (a factor of 0) with the first real score.
#pragma once

#include "attention_panels.h"

namespace conch {

// How scores are made of queries and keys.
struct AttentionConstants {
    float scale;
    float softcap;       // scores become softcap * tanh(score / softcap); 0 for none
    const float* sinks;  // [heads]: one more score for each head, that takes no value; or null
};

// Queries, keys or values of a step, [tokens][heads][size] with any strides between tokens and heads.
template <class E>
struct Heads {
    const E* data;
    ptrdiff_t token_stride;
    ptrdiff_t head_stride;

    const E* at(int64_t token, int head) const { return data + token * token_stride + head * head_stride; }
};

// Memory of a member of the team for its tiles.
struct AttentionScratch {
    static constexpr int ROWS = AttentionPlan::TILE_ROWS;

    alignas(64) float scores[ROWS * CHUNK];  // then weights, in the place of the scores of the same row
    F32 lane_totals[ROWS];                   // weights so far, LANES sums a row
    alignas(64) float largest[ROWS];
    alignas(64) float best[ROWS];            // of one chunk
    alignas(64) float factors[ROWS];         // what makes older weights comparable
    alignas(64) float totals[ROWS];
    int first[ROWS], last[ROWS];             // lanes [first, last) that each query sees
    Buffer<char> query;                      // [rows][key size]
    Buffer<float> sums;                      // [rows][value lanes]
    Buffer<char> panels;                     // what is widened from int8

    template <class E, class Stored>
    void fit(const AttentionPlan& plan) {
        query.fit(sizeof(float) * ROWS * (plan.layout.key_size + 1));
        sums.fit(size_t(ROWS) * plan.value_lanes());
        Panels<E, Stored>::fit(panels, plan.layout);
    }
};

template <class E, class Stored>
class Tile {
   public:
    Tile(const AttentionPlan& plan, const Task& task, const AttentionConstants& constants, const Stored* pool_keys,
         const Stored* pool_values, AttentionScratch& scratch)
        : plan_(plan),
          layout_(plan.layout),
          task_(task),
          constants_(constants),
          keys_(pool_keys),
          values_(pool_values),
          scratch_(scratch),
          panels_(layout_, scratch.panels),
          rows_(task.rows()),
          plain_(constants.softcap == 0 && constants.scale > 0),
          scale_(plain_ ? constants.scale * LOG2_E : 1.f) {}

    // Attend; the keys that `next` begins with are fetched towards the end. The last part of a split merges all.
    void go(Heads<E> query, const Task& next, E* out) {
        begin(query);
        Group<Stored> both[2][GROUPS];
        Group<Stored>*groups = both[0], *ahead = both[1];
        int count = locate(task_, task_.begin, groups);
        for (int lane = task_.begin; lane < task_.end; lane += CHUNK) {
            const int there = lane + CHUNK;
            const int coming = there < task_.end ? locate(task_, there, ahead) : locate(next, next.begin, ahead);
            std::fill(ahead + coming, ahead + std::max(coming, count), ahead[coming - 1]);
            score_chunk(groups, count);
            panels_.scale_scores(groups, count, scratch_.scores, rows_);
            if (!plain_) reshape(count);
            if (!all_seen(lane, count)) hide(lane, groups, count);
            weigh(count);
            add(panels_.values(groups, ahead, count));
            std::swap(groups, ahead);
            count = coming;
        }
        for (int row = 0; row < rows_; row++) scratch_.totals[row] = sum(scratch_.lane_totals[row]);
        if (task_.split == Task::NONE || merge()) finish(out);
    }

   private:
    static constexpr int GROUPS = CHUNK / LANES;
    static constexpr float NOTHING = -0x1p100f;  // a power of two: scaling it leaves no rest for a fused multiply-add

    int depth() const { return round_up(layout_.key_size, Element<E>::fold); }
    E* query() const { return reinterpret_cast<E*>(scratch_.query.data()); }

    // Copies the queries, because they lie scattered, and works out what each may see.
    void begin(Heads<E> from) {
        const int size = layout_.key_size;
        for (int row = 0; row < rows_; row++) {
            const E* one = from.at(task_.token + row / task_.heads, task_.head + row % task_.heads);
            std::memcpy(query() + row * depth(), one, size * sizeof(E));
            if (size < depth()) query()[row * depth() + size] = E{};
        }
        for (int i = 0; i < task_.queries; i++) {
            const int position = task_.position + i;
            scratch_.first[i] = plan_.window ? plan_.lane_of(std::max(0, position - plan_.window + 1)) : 0;
            scratch_.last[i] = plan_.lane_of(position) + 1;
        }
        std::fill_n(scratch_.lane_totals, rows_, F32{});
        std::fill_n(scratch_.largest, AttentionScratch::ROWS, NOTHING);
        std::fill_n(scratch_.sums.data(), rows_ * plan_.value_lanes(), 0.f);
    }

    // The groups of a task's chunk.
    int locate(const Task& task, int lane, Group<Stored>* groups) const {
        const int count = std::min(GROUPS, ceil_div(task.end - lane, LANES));
        const int kv_head = task.head / (plan_.heads / layout_.heads);
        for (int g = 0; g < count; g++, lane += LANES) {
            const int offset = lane % layout_.lanes();
            const ptrdiff_t at = layout_.group_at(task.table[lane / layout_.lanes()], kv_head, offset);
            const int tokens = std::min({LANES, layout_.block_size - offset, task.end - lane});
            groups[g] = {keys_ + at, values_ + at, tokens};
        }
        return count;
    }

    void score_chunk(const Group<Stored>* groups, int count) {
        const int blocks = ceil_div(rows_, rows_ > 2 * MAX_ROWS ? MAX_ROWS : std::max(1, MAX_ROWS - 1));
        for (int g = 0; g < count; g += 2) {
            const Group<E>* left = panels_.keys(groups, g);
            const Group<E>* right = g + 1 < count ? panels_.keys(groups, g + 1) : left;
            for (int i = 0; i < blocks; i++) {
                const int row = rows_ * i / blocks, rows = rows_ * (i + 1) / blocks - row;
                SCORE<E>[rows - 1](query() + row * depth(), depth(), left, right, depth(),
                                   scratch_.scores + row * CHUNK + g * LANES);
            }
        }
    }

    // Scales scores where more is done to them than that.
    void reshape(int count) {
        const float cap = constants_.softcap;
        for (int row = 0; row < rows_; row++)
            for (int g = 0; g < count; g++) {
                float* at = scratch_.scores + row * CHUNK + g * LANES;
                F32 x = load(at) * constants_.scale;
                store(at, LOG2_E * (cap ? cap * tanh(x / cap) : x));
            }
    }

    bool all_seen(int lane, int count) const {
        return layout_.block_size % LANES == 0 && lane + count * LANES <= scratch_.last[0] &&
               lane >= scratch_.first[task_.queries - 1];
    }

    void hide(int lane, const Group<Stored>* groups, int count) {
        for (int g = 0; g < count; g++, lane += LANES)
            for (int i = 0; i < task_.queries; i++) {
                const int first = scratch_.first[i] - lane;
                const int last = std::min(groups[g].tokens, scratch_.last[i] - lane);
                if (first <= 0 && last >= LANES) continue;
                const I32 seen = (LANE_NUMBERS >= first) & (LANE_NUMBERS < last);
                for (int row = i * task_.heads; row < (i + 1) * task_.heads; row++) {
                    float* at = scratch_.scores + row * CHUNK + g * LANES;
                    store(at, seen ? load(at) : splat(NOTHING));
                }
            }
    }

    // Scores become weights, and the factors tell what that makes of the sums so far.
    void weigh(int count) {
        for (int row = 0; row < rows_; row++) {
            const float* scores = scratch_.scores + row * CHUNK;
            F32 best = load(scores);
            for (int g = 1; g < count; g++) best = max(best, load(scores + g * LANES));
            scratch_.best[row] = conch::largest(best);
        }
        for (int row = 0; row < rows_; row += LANES) {
            F32 old = load(scratch_.largest + row), best = load(scratch_.best + row) * scale_;
            F32 now = max(old, best);
            store(scratch_.largest + row, now);
            store(scratch_.factors + row, exp2(old - now));
        }
        for (int row = 0; row < rows_; row++) {
            const float* scores = scratch_.scores + row * CHUNK;
            E* weights = reinterpret_cast<E*>(scratch_.scores + row * CHUNK);
            const F32 largest = splat(scratch_.largest[row]);
            F32 total = scratch_.lane_totals[row] * scratch_.factors[row];
            for (int g = 0; g < count; g++) {
                F32 weight = weight_of<E>(load(scores + g * LANES) * scale_ - largest);
                total += weight;
                store(weights + g * LANES, panels_.weigh(weight, g));
            }
            scratch_.lane_totals[row] = total;
        }
    }

    void add(const Values<E>& values) {
        constexpr ptrdiff_t stride = CHUNK * sizeof(float) / sizeof(E);
        const int lanes = plan_.value_lanes(), vectors = lanes / LANES;
        const int blocks = ceil_div(rows_, rows_ > 2 * VALUE_ROWS ? VALUE_ROWS : std::max(1, VALUE_ROWS - 1));
        const E* weights = reinterpret_cast<const E*>(scratch_.scores);
        for (int vector = 0; vector < vectors; vector += VALUE_VECTORS) {
            const int width = std::min(VALUE_VECTORS, vectors - vector);
            for (int i = 0; i < blocks; i++) {
                const int row = rows_ * i / blocks, rows = rows_ * (i + 1) / blocks - row;
                ADD_VALUES<E>[(rows - 1) * VALUE_VECTORS + width - 1](
                    weights + row * stride, values, vector, scratch_.factors + row,
                    scratch_.sums.data() + row * lanes + vector * LANES, lanes);
            }
        }
    }

    // Leaves this part for whoever does the last one. True for that one, which then has the sums of all.
    bool merge() {
        Split& split = plan_.split(task_);
        const int lanes = plan_.value_lanes(), size = rows_ * lanes;
        float* part = plan_.part(task_, task_.part);
        std::copy_n(scratch_.sums.data(), size, part);
        std::copy_n(scratch_.largest, rows_, part + size);
        std::copy_n(scratch_.totals, rows_, part + size + rows_);
        if (split.left.fetch_sub(1, std::memory_order_acq_rel) != 1) return false;
        split.left.store(split.parts, std::memory_order_relaxed);  // for the next layer
        for (int row = 0; row < rows_; row++) {
            float largest = NOTHING, total = 0, *sums = scratch_.sums.data() + row * lanes;
            for (int i = 0; i < split.parts; i++)
                largest = std::max(largest, plan_.part(task_, i)[size + row]);
            std::fill_n(sums, lanes, 0.f);
            for (int i = 0; i < split.parts; i++) {
                const float* other = plan_.part(task_, i);
                const float factor = std::exp2(other[size + row] - largest);
                total += factor * other[size + rows_ + row];
                for (int v = 0; v < lanes; v += LANES)
                    store(sums + v, load(sums + v) + factor * load(other + row * lanes + v));
            }
            scratch_.largest[row] = largest;
            scratch_.totals[row] = total;
        }
        return true;
    }

    void finish(E* out) {
        const int lanes = plan_.value_lanes(), size = layout_.value_size;
        for (int row = 0; row < rows_; row++) {
            const int head = task_.head + row % task_.heads;
            float factor = 1.f / scratch_.totals[row];
            if (constants_.sinks) {
                const float sink = constants_.sinks[head] * LOG2_E, largest = scratch_.largest[row];
                const float top = std::max(largest, sink), kept = std::exp2(largest - top);
                factor = kept / (scratch_.totals[row] * kept + std::exp2(sink - top));
            }
            const float* sums = scratch_.sums.data() + row * lanes;
            E* to = out + (ptrdiff_t(task_.token + row / task_.heads) * plan_.heads + head) * size;
            int v = 0;
            for (; v + LANES <= size; v += LANES) store(to + v, load(sums + v) * factor);
            for (; v < size; v++) store_one(to + v, sums[v] * factor);
        }
    }

    const AttentionPlan& plan_;
    const KvLayout& layout_;
    const Task& task_;
    const AttentionConstants& constants_;
    const Stored* keys_;
    const Stored* values_;
    AttentionScratch& scratch_;
    Panels<E, Stored> panels_;
    const int rows_;
    const bool plain_;  // scores are only scaled, which the softmax does in passing
    const float scale_;
};

}  // namespace conch
