// What a layer does with each row by itself: everything but attention.
#pragma once

#include "finish.h"
#include "matmul.h"
#include "workspace.h"

namespace conch {

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

// `left` is made of the strip's rows; `after` is what they are most likely multiplied with next.
template <class E, class Finish>
void product(const Strip<E>& strip, Left<E> left, const Matrix& weight, const Matrix& after, Finish finish) {
    if (weight.format == FP32 || weight.format == BF16)
        multiply<E>(strip.crew.team, left, weight, after, strip.own.later, finish);
    else
        multiply_quantised<E>(strip.crew.team, left, strip.scratch.quantised, weight, after, finish);
}

// All functions are to be called by every member of the strip's crew.
template <class E>
class LayerWork {
   public:
    LayerWork(const DecoderSpec& spec, const KvCache<E>& kv) : spec_(spec), kv_(kv) {}

    // Adds what the block before owes to the stream and normalises the stream for the block that comes. Where that is
    // little work each member does it for itself, which saves all of them a meeting.
    Left<E> settle(const Strip<E>& strip, const Norm& owed, const Norm& next) const {
        const int hidden = spec_.hidden, rows = strip.count;
        const bool alone = !owed.weight && rows <= OWN_ROWS;
        Buffer<E>& room = alone ? strip.own.scratch.normed : strip.scratch.normed;
        if (alone) room.fit(size_t(OWN_ROWS) * hidden);
        E* normed = room.data();
        auto settle_row = [&](int row) {
            float* stream = strip.stream + ptrdiff_t(row) * hidden;
            if (owed.weight)
                normalise(owed, strip.scratch.block.data() + ptrdiff_t(row) * hidden, hidden,
                          [&](int i, F32 x) { store(stream + i, load(stream + i) + x * spec_.residual_scale); });
            E* out = normed + ptrdiff_t(row) * hidden;
            normalise(next, stream, hidden, [&](int i, F32 x) { store(out + i, x); });
        };
        if (alone) {
            for (int row = 0; row < rows; row++) settle_row(row);
        } else {
            each_row(strip, settle_row);
        }
        return {normed, hidden, rows};
    }

    // Queries, and keys and values in the pool.
    void project(const Strip<E>& strip, Left<E> normed, const Rows& rows, const Layer& layer, const Pool& pool) const {
        float* qkv = strip.scratch.qkv.data();
        product(strip, normed, layer.qkv, layer.out, keep(layer.qkv, qkv));
        const int size = spec_.head_size, heads = spec_.heads, kv_heads = spec_.kv_heads;
        each_row(strip, [&](int row) {
            const int token = strip.first + row;
            float* query = qkv + ptrdiff_t(row) * layer.qkv.columns;
            float *key = query + heads * size, *value = key + kv_heads * size;
            prepare(layer, layer.query, query, heads, rows.positions[token]);
            prepare(layer, layer.key, key, kv_heads, rows.positions[token]);
            E* out = strip.query + ptrdiff_t(row) * heads * size;
            for (int i = 0; i < heads * size; i += LANES) store(out + i, load(query + i));
            kv_.write(spec_.kv, pool, rows.slots[token], key, value);
        });
    }

    // From what attention has found to the end of the layer, whose last norm stays owed. `following` comes next.
    void finish(const Strip<E>& strip, const Layer& layer, const Matrix& following) const {
        E* inner = strip.scratch.inner.data();
        join(strip, Left<E>{strip.attended, spec_.heads * spec_.head_size, strip.count}, layer.out, layer.attention_out,
             layer.up);
        product(strip, settle(strip, layer.attention_out, layer.mlp_in), layer.up, layer.down,
                activated(layer.up, spec_.activation, inner));
        join(strip, Left<E>{inner, spec_.inner, strip.count}, layer.down, layer.mlp_out, following);
    }

   private:
    static constexpr int OWN_ROWS = 32;

    // The end of a block: added to the stream or, where a norm comes first, left for `settle`.
    void join(const Strip<E>& strip, Left<E> left, const Matrix& weight, const Norm& norm, const Matrix& after) const {
        if (norm.weight)
            product(strip, left, weight, after, keep(weight, strip.scratch.block.data()));
        else
            product(strip, left, weight, after, add(weight, spec_.residual_scale, strip.stream));
    }

    template <class Work>
    static void each_row(const Strip<E>& strip, Work work) {
        const int rows = strip.count, chunk = rows < 64 ? 1 : 8;
        strip.crew.team.each(ceil_div(rows, chunk), [&](int item) {
            for (int row = item * chunk; row < std::min(rows, (item + 1) * chunk); row++) work(row);
        });
    }

    // Normalises and rotates the heads of a query or a key.
    void prepare(const Layer& layer, const Norm& norm, float* row, int heads, int64_t position) const {
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

    const DecoderSpec& spec_;
    const KvCache<E>& kv_;
};

}  // namespace conch
