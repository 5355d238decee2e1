// How keys and values lie in the pool, and how one token's get there.
//
// A layer's pool is [2, blocks, kv heads, S, D]: keys, then values; S is the block size and D the larger head
// size, both rounded up to LANES. The S * D elements of one block and head are cut into groups of LANES tokens:
//
//   keys    [S / LANES][D / fold][LANES tokens][fold]   a panel: one load holds the same pair of dimensions
//                                                       of all tokens, so scores need no horizontal sums
//   values  [S / LANES][LANES / fold][D][fold]          a panel whose depth is the tokens
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

    int lanes() const { return round_up(block_size, LANES); }
    int depth() const { return round_up(std::max(key_size, value_size), LANES); }
    ptrdiff_t group_elements() const { return ptrdiff_t(LANES) * depth(); }
    ptrdiff_t head_elements() const { return ptrdiff_t(lanes()) * depth(); }
    ptrdiff_t block_elements() const { return heads * head_elements(); }

    // Where the group of LANES tokens begins that has the token at `offset` of a block.
    ptrdiff_t group_at(int64_t block, int head, int offset) const {
        return block * block_elements() + head * head_elements() + offset / LANES * group_elements();
    }
};

// Write one token's key, which is rotated already, and value of one head to its slot (block * block size + offset).
// Touches nothing that belongs to another token, so members of a team may write neighbours at once.
template <class E>
void write_kv(const KvLayout& layout, E* pool_keys, E* pool_values, int64_t slot, int head, const float* key,
              const float* value) {
    constexpr int fold = Element<E>::fold;
    const int offset = int(slot % layout.block_size), lane = offset % LANES;
    const ptrdiff_t group = layout.group_at(slot / layout.block_size, head, offset);
    E few[LANES];
    auto take = [&](const float* from, int count) {
        alignas(64) float last[LANES] = {};  // the dimension that fills up a fold must be 0
        if (count < LANES) from = static_cast<const float*>(std::memcpy(last, from, count * sizeof(float)));
        store(few, load(from));
        return std::min(count, LANES);
    };
    E* keys = pool_keys + group + lane * fold;
    for (int d = 0; d < layout.key_size; d += LANES) {
        const int count = take(key + d, layout.key_size - d);
        for (int i = 0; i < count; i += fold, keys += LANES * fold) std::memcpy(keys, few + i, fold * sizeof(E));
    }
    E* values = pool_values + group + ptrdiff_t(lane / fold) * layout.depth() * fold + lane % fold;
    for (int d = 0; d < layout.value_size; d += LANES) {
        const int count = take(value + d, layout.value_size - d);
        for (int i = 0; i < count; i++, values += fold) *values = few[i];
    }
}

}  // namespace conch
