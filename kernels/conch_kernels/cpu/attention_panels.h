// The panels of a chunk of keys and values, as the products of attention read them, whatever the pool keeps.
#pragma once

#include "attention_kernels.h"
#include "attention_plan.h"
#include "buffer.h"

namespace conch {

// A tile goes through a chunk with these: `keys`, `scale_scores`, then `values` and `weigh`.
template <class E, class Stored>
class Panels;

// What is computed with lies in the pool itself.
template <class E>
class Panels<E, E> {
   public:
    static void fit(Buffer<char>&, const KvLayout&) {}

    Panels(const KvLayout& layout, Buffer<char>&) : layout_(layout) {}

    const Group<E>* keys(const Group<E>* groups, int g) { return groups + g; }
    void scale_scores(const Group<E>*, int, float*, int) {}
    Values<E> values(const Group<E>* groups, const Group<E>* ahead, int count) {
        return {groups, ahead, count, layout_.depth()};
    }
    F32 weigh(F32 weight, int) const { return weight; }

   private:
    const KvLayout& layout_;
};

// The numbers at one of the four places in each lane, times WIDENED: not to shift them down is what makes this quick.
constexpr float WIDENED = 0x1p24f;
inline F32 widened(I32 line, int place) {
    return __builtin_convertvector((line << (24 - 8 * place)) & int32_t(0xff000000), F32);
}

// A line of LANES times four int8 to the two or four panels that they are among, `stride` elements apart.
inline void widen(const int8_t* from, float* to, ptrdiff_t stride) {
    const I32 line = load_as<I32>(from);
    for (int place = 0; place < 4; place++) store(to + place * stride, widened(line, place));
}
inline void widen(const int8_t* from, bf16* to, ptrdiff_t stride) {
    const I32 line = load_as<I32>(from);
    for (int pair = 0; pair < 2; pair++) {  // their lower halves are 0: a whole number below 2^8 is a bf16
        const U32 one = (U32)widened(line, 2 * pair), two = (U32)widened(line, 2 * pair + 1);
        const U32 both = (one >> 16) | two;
        std::memcpy(to + pair * stride, &both, sizeof both);
    }
}

// int8 is widened into memory of the member's own, which stays in its first caches: keys, and when these are done
// with, values. Scales of keys multiply scores, those of values multiply weights before they are rounded.
template <class E>
class Panels<E, int8_t> {
   public:
    static void fit(Buffer<char>& room, const KvLayout& layout) {
        room.fit(sizeof(E) * CHUNK * layout.depth());
    }

    Panels(const KvLayout& layout, Buffer<char>& room)
        : layout_(layout), room_(reinterpret_cast<E*>(room.data())), group_(ptrdiff_t(LANES) * layout.depth()) {
        for (int g = 0; g < GROUPS; g++) wide_[g] = {room_ + g * group_, room_ + g * group_, 0};
    }

    // Values of the same tokens are fetched on the way.
    const Group<E>* keys(const Group<int8_t>* groups, int g) {
        const int bytes = LANES * round_up(layout_.key_size, Element<int8_t>::fold);
        const int8_t *from = groups[g].keys, *next = groups[g].values;
        E* to = room_ + g * group_;
        for (int i = 0; i < bytes; i += LINE) {
            prefetch_to_l2(next + i);
            widen(from + i, to + i, LANES * fold);
        }
        prefetch_to_l2(scales_of(layout_, next));
        wide_[g].tokens = groups[g].tokens;
        return wide_ + g;
    }

    // Where a group has lanes of no token of the row's, their scales may be NaN: such scores are hidden afterwards,
    // but a weight of 0 would become NaN, so scales of values are 0 there.
    void scale_scores(const Group<int8_t>* groups, int count, float* scores, int rows) {
        for (int g = 0; g < count; g++) {
            value_scales_[g] = LANE_NUMBERS < groups[g].tokens ? scales(groups[g].values) : F32{};
            const F32 of_keys = scales(groups[g].keys);
            float* at = scores + g * LANES;
            for (int row = 0; row < rows; row++, at += CHUNK) store(at, load(at) * of_keys);
        }
    }

    // The keys that come next are fetched on the way.
    Values<E> values(const Group<int8_t>* groups, const Group<int8_t>* ahead, int count) {
        const int depth = layout_.depth();
        for (int g = 0; g < count; g++) {
            const int8_t *from = groups[g].values, *next = ahead[g].keys;
            for (E* to = room_ + g * group_; to < room_ + (g + 1) * group_; to += 4 * depth)
                for (int d = 0; d < depth; d += LANES, from += LINE, next += LINE) {
                    prefetch_to_l2(next);
                    widen(from, to + d * fold, depth * fold);
                }
            prefetch_to_l2(next);  // its scales
        }
        return {wide_, wide_, count, depth};
    }

    F32 weigh(F32 weight, int group) const { return weight * value_scales_[group]; }

   private:
    static constexpr int GROUPS = CHUNK / LANES;
    static constexpr int LINE = LANES * Element<int8_t>::fold;
    static constexpr int fold = Element<E>::fold;

    F32 scales(const int8_t* group) const { return load(scales_of(layout_, group)) * (1 / WIDENED); }

    const KvLayout& layout_;
    E* room_;
    const ptrdiff_t group_;
    Group<E> wide_[GROUPS];
    F32 value_scales_[GROUPS];
};

}  // namespace conch
