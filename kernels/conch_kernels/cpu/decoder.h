// A decoder described by data, run a whole step at a time.
//
// One description serves the common families: norms before or after a block or both, norms of query and key,
// biases, gated or plain activation, full or partial rotary embedding, sliding windows, soft caps, multipliers.
// What a model lacks is a null pointer or a one. The residual stream is fp32, whatever the weights are.
#pragma once

#include <map>
#include <vector>

#include "buffer.h"
#include "decoder_spec.h"
#include "entry.h"
#include "gather.h"
#include "matmul.h"
#include "norm.h"

namespace conch {

inline F32 activate(int kind, F32 x) {
    switch (kind) {
        case SILU: return x * sigmoid(x);
        case GELU_TANH: return x * sigmoid(1.5957691f * (x + 0.044715f * x * x * x));
        case RELU: return max(x, F32{});
        default: {
            F32 result = {};
            for (int i = 0; i < LANES; i++) result[i] = 0.5f * x[i] * (1.f + std::erf(x[i] * 0.70710678f));
            return result;
        }
    }
}

// Rotates one head in place: lane i with lane i + rotary / 2.
inline void rotate(float* head, const float* cosines, int rotary) {
    int half = rotary / 2;
    const float* sines = cosines + half;
    for (int i = 0; i < half; i++) {
        float a = head[i], b = head[i + half];
        head[i] = a * cosines[i] - b * sines[i];
        head[i + half] = b * cosines[i] + a * sines[i];
    }
}

// What a step needs besides weights; grows to the largest step seen.
template <class E>
struct Workspace {
    Buffer<float> stream;  // [T, hidden], the residual stream
    Buffer<float> block;   // [T, hidden], what a block adds to it where that is normalised first
    Buffer<float> qkv;     // [T, (H + 2 K) D]
    Buffer<E> normed;      // [T, hidden]
    Buffer<E> query;       // [T, H D]
    Buffer<E> attended;    // [T, H D]
    Buffer<E> inner;       // [T, inner]
    QuantisedRows quantised;    // a left operand of weights that are

    void fit(const DecoderSpec& spec, size_t tokens) {
        stream.fit(tokens * spec.hidden);
        block.fit(tokens * spec.hidden);
        qkv.fit(tokens * (spec.heads + 2 * spec.kv_heads) * spec.head_size);
        normed.fit(tokens * spec.hidden);
        query.fit(tokens * spec.heads * spec.head_size);
        attended.fit(tokens * spec.heads * spec.head_size);
        inner.fit(tokens * spec.inner);
    }
};

// What each member of the team has to itself.
template <class E>
struct Own {
    AttentionScratch attention;
    KvAhead later;
    Buffer<E> normed;  // [T, hidden], where T is small
    Seen seen;
};

template <class E>
class Decoder {
   public:
    explicit Decoder(const DecoderSpec& spec)
        : spec_(spec),
          layers_(spec.layers, spec.layers + spec.num_layers),
          kv_(kv_cache<E>(spec_.kv)),
          entrance_(spec_) {
        for (const Layer& layer : layers_) widest_ = std::max(widest_, layer.window ? layer.window : INT32_MAX);
        if (widest_ == INT32_MAX) widest_ = 0;
    }

    // Writes the step's KV and its logits.
    void run(Team& team, const Step& step) {
        space_.fit(spec_, step.rows.tokens);
        if (spec_.entry) entrance_.fit(step);
        if (own_.size() < size_t(team.size())) own_ = std::vector<Own<E>>(team.size());
        Plans plans;
        for (int index = 0; index + 1 < spec_.num_layers; index++) plan(plans, layers_[index].window, step.rows);
        Plans ending;  // of the last layer, whose output is wanted in some rows only
        const std::vector<int32_t> cu_wanted = wanted_queries(step);
        Rows wanted = step.rows;
        wanted.cu_query = cu_wanted.data();
        plan(ending, layers_.back().window, ends_with_states(step) ? step.rows : wanted);
        team.run([&](int member) { go(team, step, plans, ending, member); });
        for (int row = 0; row < step.num_logit_rows; row++) {
            step.likeliest[row] = {-INFINITY, 0};
            for (int member = 0; member < team.size(); member++) own_[member].seen.improve(row, step.likeliest[row]);
        }
    }

   private:
    static constexpr int OWN_ROWS = 8;

    using Plans = std::map<int, AttentionPlan>;  // by window

    void plan(Plans& plans, int window, const Rows& rows) const {
        plans.try_emplace(window, rows, spec_.kv, spec_.heads, window);
    }

    // Where each row's wanted queries begin among all that are: they are the row's last ones.
    static std::vector<int32_t> wanted_queries(const Step& step) {
        std::vector<int32_t> begins(step.rows.rows + 1);
        int found = 0;
        for (int row = 0; row < step.rows.rows; row++) {
            while (found < step.num_logit_rows && step.logit_rows[found] < step.rows.cu_query[row + 1]) found++;
            begins[row + 1] = found;
        }
        return begins;
    }

    void go(Team& team, const Step& step, const Plans& plans, const Plans& ending, int member) {
        Own<E>& own = own_[member];
        const int hidden = spec_.hidden, wide = spec_.heads * spec_.head_size;
        int rows = step.rows.tokens;
        if (rows > MAX_ROWS)  // fewer fetch nothing
            own.later.list(step.rows, spec_.kv, spec_.kv.is_int8 ? 1 : sizeof(E), widest_, member, team.size());
        own.later.rest();
        const Norm none = {};
        const Norm* owed = &none;  // normalises what the block before has left in `block`
        for (int index = 0; index < spec_.num_layers; index++) {
            const Layer& layer = layers_[index];
            const Pool pool = pool_of(step, index);
            const Left<E> normed =
                index ? settle(team, rows, *owed, layer.attention_in, own) : enter(team, step, own);
            if (step.states) keep_states(team, step, index, member);
            product(team, normed, layer.qkv, layer.out, own.later, keep(layer.qkv, space_.qkv.data()));
            place(team, step.rows, layer, pool);
            const bool last = index + 1 == spec_.num_layers;
            if (last && !ends_with_states(step) && !(rows = gather(team, step))) return;
            const Heads<E> query{space_.query.data(), wide, spec_.head_size};
            kv_.attend(team, (last ? ending : plans).at(layer.window), layer.attention, pool, query,
                       space_.attended.data(), own.attention);
            if (rows > MAX_ROWS && !last)
                own.later.aim(pool_of(step, index + 1));
            else
                own.later.rest();
            product(team, Left<E>{space_.attended.data(), wide, rows}, layer.out, layer.up, own.later,
                    add(layer.out, layer.attention_out));
            product(team, settle(team, rows, layer.attention_out, layer.mlp_in, own), layer.up, layer.down, own.later,
                    activated(layer.up));
            product(team, Left<E>{space_.inner.data(), spec_.inner, rows}, layer.down,
                    last ? spec_.head : layers_[index + 1].qkv, own.later, add(layer.down, layer.mlp_out));
            owed = &layer.mlp_out;
        }
        if (ends_with_states(step)) {
            settle(team, rows, *owed, spec_.final, own);
            owed = &none;
            keep_states(team, step, spec_.num_layers, member);
            team.barrier();
            if (!(rows = gather(team, step))) return;
        }
        own.seen.begin(rows);
        const Left<E> left = settle(team, rows, *owed, spec_.final, own);
        if (step.outputs) keep_rows(team, rows, step.outputs, spec_.hidden, member);
        product(team, left, spec_.head, spec_.head, own.later, logits(step.logits, own.seen));
    }

    template <class Finish>
    void product(Team& team, Left<E> left, const Matrix& weight, const Matrix& after, KvAhead& later,
                 Finish finish) {
        if (weight.format == FP32 || weight.format == BF16)
            multiply<E>(team, left, weight, after, later, finish);
        else
            multiply_quantised<E>(team, left, space_.quantised, weight, after, finish);
    }

    static Pool pool_of(const Step& step, int layer) {
        return {step.pools[layer], static_cast<char*>(step.pools[layer]) + step.pool_half};
    }

    // Begins the stream; returns what the first layer reads.
    Left<E> enter(Team& team, const Step& step, Own<E>& own) {
        const Layer& first = layers_.front();
        if (spec_.entry) {
            const Left<E> joined = entrance_.join(team, step, space_.stream.data(), first.qkv, own.later);
            if (joined.count) return joined;
        } else {
            embed(team, step);
        }
        return settle(team, step.rows.tokens, Norm{}, first.attention_in, own);
    }

    void embed(Team& team, const Step& step) {
        const int hidden = spec_.hidden;
        team.each(step.rows.tokens, [&](int token) {
            int64_t id = step.input_ids[token];
            float* out = space_.stream.data() + ptrdiff_t(token) * hidden;
            if (spec_.embedding) {
                const E* row = static_cast<const E*>(spec_.embedding) + id * hidden;
                for (int i = 0; i < hidden; i += LANES) store(out + i, load(row + i) * spec_.embedding_scale);
            } else {
                gather_column(spec_.head, int(id), out);
                for (int i = 0; i < hidden; i++) out[i] *= spec_.embedding_scale;
            }
        });
    }

    // Adds what the block before owes to the stream and normalises the stream for the block that comes. Where that is
    // little work each member does it for itself, which saves all of them a meeting.
    Left<E> settle(Team& team, int rows, const Norm& owed, const Norm& next, Own<E>& own) {
        const int hidden = spec_.hidden;
        const bool alone = !owed.weight && rows <= OWN_ROWS;
        if (alone) own.normed.fit(size_t(OWN_ROWS) * hidden);
        E* normed = alone ? own.normed.data() : space_.normed.data();
        auto settle_row = [&](int row) {
            float* stream = space_.stream.data() + ptrdiff_t(row) * hidden;
            if (owed.weight)
                normalise(owed, space_.block.data() + ptrdiff_t(row) * hidden, hidden,
                          [&](int i, F32 x) { store(stream + i, load(stream + i) + x * spec_.residual_scale); });
            E* out = normed + ptrdiff_t(row) * hidden;
            normalise(next, stream, hidden, [&](int i, F32 x) { store(out + i, x); });
        };
        if (alone) {
            for (int row = 0; row < rows; row++) settle_row(row);
        } else {
            const int chunk = rows < 64 ? 1 : 8;
            team.each(ceil_div(rows, chunk), [&](int item) {
                for (int row = item * chunk; row < std::min(rows, (item + 1) * chunk); row++) settle_row(row);
            });
        }
        return {normed, hidden, rows};
    }

    // Normalises and rotates queries and keys, and writes keys and values into the pool.
    void place(Team& team, const Rows& rows, const Layer& layer, const Pool& pool) {
        const int size = spec_.head_size, heads = spec_.heads, kv_heads = spec_.kv_heads;
        const int wide = (heads + 2 * kv_heads) * size;
        const int chunk = rows.tokens < 64 ? 1 : 8;
        team.each(ceil_div(rows.tokens, chunk), [&](int item) {
            for (int token = item * chunk; token < std::min(rows.tokens, (item + 1) * chunk); token++) {
                float* query = space_.qkv.data() + ptrdiff_t(token) * wide;
                float *key = query + heads * size, *value = key + kv_heads * size;
                prepare(layer, layer.query, query, heads, rows.positions[token]);
                prepare(layer, layer.key, key, kv_heads, rows.positions[token]);
                E* out = space_.query.data() + ptrdiff_t(token) * heads * size;
                for (int i = 0; i < heads * size; i += LANES) store(out + i, load(query + i));
                kv_.write(spec_.kv, pool, rows.slots[token], key, value);
            }
        });
    }

    void prepare(const Layer& layer, const Norm& norm, float* row, int heads, int64_t position) {
        const int size = spec_.head_size;
        if (norm.weight && spec_.norm_whole_rows)
            normalise(norm, row, heads * size, [&](int i, F32 x) { store(row + i, x); });
        for (int head = 0; head < heads; head++) {
            float* one = row + head * size;
            if (norm.weight && !spec_.norm_whole_rows)
                normalise(norm, one, size, [&](int i, F32 x) { store(one + i, x); });
            if (layer.rope) rotate(one, layer.rope + position * spec_.rotary, spec_.rotary);
        }
    }

    // Moves the rows whose logits are wanted to the front and returns how many there are. After the last layer's keys
    // and values nothing needs the others.
    int gather(Team& team, const Step& step) {
        const int rows = step.num_logit_rows;
        if (rows && rows < step.rows.tokens)
            team.each(1, [&](int) {
                for (int row = 0; row < rows; row++) {
                    move_row(space_.stream.data(), spec_.hidden, step.logit_rows[row], row);
                    move_row(space_.query.data(), spec_.heads * spec_.head_size, step.logit_rows[row], row);
                }
            });
        return rows;
    }

    // Whether somebody asks for what comes out of the last layer, of tokens without logits too.
    bool ends_with_states(const Step& step) const {
        return step.states && step.state_layers[step.num_states - 1] == spec_.num_layers;
    }

    // Copies the stream as it goes into a layer, where that is asked for. Nobody changes it before the next meeting.
    void keep_states(const Team& team, const Step& step, int layer, int member) {
        const ptrdiff_t hidden = spec_.hidden, wide = hidden * step.num_states;
        for (int place = 0; place < step.num_states; place++) {
            if (step.state_layers[place] == layer)
                keep_rows(team, step.rows.tokens, step.states + place * hidden, wide, member);
        }
    }

    void keep_rows(const Team& team, int rows, float* to, ptrdiff_t stride, int member) {
        const ptrdiff_t hidden = spec_.hidden;
        for (int row = member; row < rows; row += team.size())
            std::copy_n(space_.stream.data() + row * hidden, hidden, to + row * stride);
    }

    template <class T>
    static void move_row(T* rows, ptrdiff_t size, ptrdiff_t from, ptrdiff_t to) {
        if (from != to) std::copy_n(rows + from * size, size, rows + to * size);
    }

    // -- what becomes of a product: values [rows][PANEL] of columns `column` and on -----------------------------

    auto add(const Matrix& weight, const Norm& norm) {
        float* target = norm.weight ? space_.block.data() : space_.stream.data();
        const float kept = norm.weight ? 0.f : 1.f, scale = norm.weight ? 1.f : spec_.residual_scale;
        return [=, &weight](int first, int rows, int column, const float* values) {
            const int width = std::min(PANEL, weight.columns - column);
            for (int row = 0; row < rows; row++)
                for (int i = 0; i < width; i += LANES) {
                    float* at = target + ptrdiff_t(first + row) * weight.columns + column + i;
                    F32 x = biased(weight, values + row * PANEL + i, column + i) * scale;
                    store(at, kept ? load(at) + x : x);
                }
        };
    }

    // Gate and up lie side by side in a tile.
    auto activated(const Matrix& weight) {
        E* out = space_.inner.data();
        const int kind = spec_.activation, inner = spec_.inner;
        return [=, &weight](int first, int rows, int column, const float* values) {
            for (int row = 0; row < rows; row++, values += PANEL) {
                F32 gate = activate(kind, biased(weight, values, column));
                store(out + ptrdiff_t(first + row) * inner + column / 2,
                      gate * biased(weight, values + LANES, column + LANES));
            }
        };
    }

    auto logits(float* out, Seen& seen) {
        const Matrix& weight = spec_.head;
        const float scale = spec_.logit_scale, cap = spec_.logit_softcap;
        return [=, &weight, &seen](int first, int rows, int column, const float* values) {
            const int columns = weight.columns, width = std::min(PANEL, columns - column);
            for (int row = 0; row < rows; row++) {
                float* at = out + ptrdiff_t(first + row) * columns + column;
                for (int i = 0; i < width; i += LANES) {
                    F32 x = load(values + row * PANEL + i);
                    if (weight.bias)
                        for (int lane = 0; lane < std::min(LANES, width - i); lane++)
                            x[lane] += weight.bias[column + i + lane];
                    x *= scale;
                    if (cap) x = cap * tanh(x / cap);
                    seen.see(first + row, column + i, x, width - i);
                    if (width - i >= LANES)
                        store(at + i, x);
                    else
                        std::copy_n(reinterpret_cast<const float*>(&x), width - i, at + i);
                }
            }
        };
    }

    DecoderSpec spec_;
    std::vector<Layer> layers_;
    const KvCache<E>& kv_;
    int32_t widest_ = 0;  // of the layers' windows; 0 where one has none
    Workspace<E> space_;
    Entrance<E> entrance_;
    std::vector<Own<E>> own_;  // one a member
};

}  // namespace conch
