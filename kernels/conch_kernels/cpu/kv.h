// How keys and values lie in the pool, and how one token's get there.
//
// A layer's pool is [2, blocks, kv heads, S, D]: keys, then values; S is the block size and D the larger head
// size, both rounded up to LANES. The S * D elements of one block and head are cut into groups of LANES tokens:
//
//   keys    [S / LANES][D / fold][LANES tokens][fold]   a panel: one load holds the same pair of dimensions
//                                                       of all tokens, so scores need no horizontal sums
//   values  [S / LANES][LANES / fold][D][fold]          a panel whose depth is the tokens
//
// KV is kept as elements of what is computed with, or as int8, whose fold is 4, with a scale for each token and head,
// of its key and of its value: a number q means q * scale. The fp32 scales of a group, [LANES], come after its
// numbers, so whatever copies a block has them too.
//
// A token's place among these, its block times S plus its offset, is called its lane. Where the block size is no
// multiple of LANES the last lanes of a block are never written, and like all that has not been written they may
// hold anything, NaN too.
#pragma once

#include <algorithm>
#include <cstddef>

#include "simd.h"

namespace conch {

// Born in Python (conch_kernels.cpu_attention.KvLayout, the same fields in the same order).
struct KvLayout {
    int32_t heads;
    int32_t key_size;
    int32_t value_size;
    int32_t block_size;
    int32_t is_int8;

    int lanes() const { return round_up(block_size, LANES); }
    int depth() const { return round_up(std::max(key_size, value_size), LANES); }
    int scale_elements() const { return is_int8 ? sizeof(float) / sizeof(int8_t) : 0; }
    ptrdiff_t group_elements() const { return ptrdiff_t(LANES) * (depth() + scale_elements()); }
    ptrdiff_t head_elements() const { return lanes() / LANES * group_elements(); }
    ptrdiff_t block_elements() const { return heads * head_elements(); }

    // Where the group of LANES tokens begins that has the token at `offset` of a block.
    ptrdiff_t group_at(int64_t block, int head, int offset) const {
        return block * block_elements() + head * head_elements() + offset / LANES * group_elements();
    }
};

// A layer's keys and values.
struct Pool {
    void* keys;
    void* values;
};

// The scales of a group of int8.
inline float* scales_of(const KvLayout& layout, int8_t* group) {
    return reinterpret_cast<float*>(group + ptrdiff_t(LANES) * layout.depth());
}
inline const float* scales_of(const KvLayout& layout, const int8_t* group) {
    return reinterpret_cast<const float*>(group + ptrdiff_t(LANES) * layout.depth());
}

// The first LANES of `count` elements; where there are fewer, zeros follow.
inline F32 load_some(const float* from, int count) {
    if (count >= LANES) return load(from);
    alignas(64) float last[LANES] = {};
    std::memcpy(last, from, count * sizeof(float));
    return load(last);
}

// How one token's key or value is made smaller: rounded.
template <class Stored>
struct Narrowing {
    Narrowing(const float*, int) {}
    void narrow(Stored* to, F32 x) const { store(to, x); }
    void keep_scale(const KvLayout&, Stored*, int) const {}
};

// To numbers of at most 127 and a scale, which is NaN where an element is not finite.
template <>
struct Narrowing<int8_t> {
    static constexpr float MOST = 127.f;
    static constexpr float LEAST = 0x1p-120f;  // below this all is 0: the inverse would overflow
    float scale, inverse;

    Narrowing(const float* from, int size) {
        F32 most = {}, broken = {};
        for (int d = 0; d < size; d += LANES) {
            const F32 x = load_some(from + d, size - d);
            most = max(most, max(x, -x));
            broken += x * 0.f;
        }
        const float top = largest(most);
        scale = top / MOST + sum(broken);
        inverse = scale > 0 ? MOST / std::max(top, LEAST) : 0.f;
    }
    void narrow(int8_t* to, F32 x) const { store(to, inverse ? x * inverse : F32{}); }
    void keep_scale(const KvLayout& layout, int8_t* group, int lane) const { scales_of(layout, group)[lane] = scale; }
};

// Write one token's key, which is rotated already, and value of one head to its slot (block * block size + offset).
// Touches nothing that belongs to another token, so members of a team may write neighbours at once.
template <class Stored>
void write_kv(const KvLayout& layout, Stored* pool_keys, Stored* pool_values, int64_t slot, int head,
              const float* key, const float* value) {
    constexpr int fold = Element<Stored>::fold;
    const int offset = int(slot % layout.block_size), lane = offset % LANES;
    const ptrdiff_t group = layout.group_at(slot / layout.block_size, head, offset);
    Stored few[LANES];
    auto take = [&](const Narrowing<Stored>& as, const float* from, int count) {
        as.narrow(few, load_some(from, count));  // the dimension that fills up a fold is 0
        return std::min(count, LANES);
    };
    const Narrowing<Stored> as_key(key, layout.key_size), as_value(value, layout.value_size);
    as_key.keep_scale(layout, pool_keys + group, lane);
    as_value.keep_scale(layout, pool_values + group, lane);
    Stored* keys = pool_keys + group + lane * fold;
    for (int d = 0; d < layout.key_size; d += LANES) {
        const int count = take(as_key, key + d, layout.key_size - d);
        for (int i = 0; i < count; i += fold, keys += LANES * fold) std::memcpy(keys, few + i, fold * sizeof(Stored));
    }
    Stored* values = pool_values + group + ptrdiff_t(lane / fold) * layout.depth() * fold + lane % fold;
    for (int d = 0; d < layout.value_size; d += LANES) {
        const int count = take(as_value, value + d, layout.value_size - d);
        for (int i = 0; i < count; i++, values += fold) *values = few[i];
    }
}

}  // namespace conch
