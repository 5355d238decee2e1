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

    const Group<E>* keys(const Group<E>* groups, int) { return groups; }
    void scale_scores(const Group<E>*, int, float*, int) {}
    Values<E> values(const Group<E>* groups, const Group<E>* ahead, int count) {
        return {groups, ahead, count, layout_.depth()};
    }
    F32 weigh(F32 weight, int) const { return weight; }

   private:
    const KvLayout& layout_;
};

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
    const Group<E>* keys(const Group<int8_t>* groups, int count) {
        const int elements = LANES * round_up(layout_.key_size, Element<E>::fold);
        for (int g = 0; g < count; g++) {
            widen(groups[g].keys, elements, room_ + g * group_, groups[g].values);
            wide_[g].tokens = groups[g].tokens;
        }
        return wide_;
    }

    // Where a group has lanes of no token of the row's, their scales may be NaN: such scores are hidden afterwards,
    // but a weight of 0 would become NaN, so scales of values are 0 there.
    void scale_scores(const Group<int8_t>* groups, int count, float* scores, int rows) {
        const I32 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        for (int g = 0; g < count; g++) {
            value_scales_[g] = lanes < groups[g].tokens ? load(scales_of(layout_, groups[g].values)) : F32{};
            const F32 scales = load(scales_of(layout_, groups[g].keys));
            float* at = scores + g * LANES;
            for (int row = 0; row < rows; row++, at += CHUNK) store(at, load(at) * scales);
        }
    }

    // The keys that come next are fetched on the way.
    Values<E> values(const Group<int8_t>* groups, const Group<int8_t>* ahead, int count) {
        for (int g = 0; g < count; g++) widen(groups[g].values, int(group_), room_ + g * group_, ahead[g].keys);
        return {wide_, wide_, count, layout_.depth()};
    }

    F32 weigh(F32 weight, int group) const { return weight * value_scales_[group]; }

   private:
    static constexpr int GROUPS = CHUNK / LANES;

    void widen(const int8_t* from, int elements, E* to, const int8_t* next) const {
        constexpr int line = 64;
        for (int i = 0; i < elements; i += line) {
            prefetch_to_l2(next + i);
            for (int j = i; j < std::min(elements, i + line); j += LANES) store(to + j, load(from + j));
        }
        prefetch_to_l2(next + group_);
    }

    const KvLayout& layout_;
    E* room_;
    const ptrdiff_t group_;
    Group<E> wide_[GROUPS];
    F32 value_scales_[GROUPS];
};

}  // namespace conch
