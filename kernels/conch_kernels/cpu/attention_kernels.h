// The two products of attention, for a few rows and a chunk of keys: scores, and values weighed and summed.
#pragma once

#include <array>
#include <utility>

#include "kv.h"
#include "matrix.h"

namespace conch {

// LANES tokens of one block and head; only the first `tokens` are the row's own.
template <class T>
struct Group {
    const T* keys;
    const T* values;
    int tokens;
};

#if defined(__AVX512F__)
constexpr int VALUE_ROWS = 6;  // 24 sums, 4 vectors of values and a few to spare of 32 registers
constexpr int VALUE_VECTORS = 4;
#else
constexpr int VALUE_ROWS = 2;
constexpr int VALUE_VECTORS = 2;
#endif

constexpr int CHUNK = 128;  // keys that are scored and weighed before their values are looked at

// Scores of ROWS queries, `stride` elements apart, with the tokens of two groups: out[ROWS][CHUNK]. Fewer rows than
// can be are what decodes have, whose time goes into reading KV: they fetch the same groups' values on the way.
template <class E, int ROWS>
void score(const E* query, ptrdiff_t stride, const Group<E>* left, const Group<E>* right, int depth, float* out) {
    constexpr int fold = Element<E>::fold;
    const E *keys = left->keys, *others = right->keys;
    const char *ahead = (const char*)left->values, *next = (const char*)right->values;
    F32 sums[ROWS][2] = {};
    const E* third[(ROWS + 2) / 3];  // every third row; the two after it are reached by the stride
    for (int i = 0; i < (ROWS + 2) / 3; i++) third[i] = query + 3 * i * stride;
    for (int k = 0; k < depth; k += fold) {
        auto one = load_panel(keys), two = load_panel(others);
        keys += LANES * fold;
        others += LANES * fold;
        if constexpr (ROWS < MAX_ROWS) {
            prefetch_to_l2(ahead);
            prefetch_to_l2(next);
            ahead += 64;
            next += 64;
        }
#pragma GCC unroll 16
        for (int m = 0; m < ROWS; m++) {
            auto x = Element<E>::spread(third[m / 3] + (m % 3) * stride);
            sums[m][0] = Element<E>::dot(sums[m][0], x, one);
            sums[m][1] = Element<E>::dot(sums[m][1], x, two);
        }
#pragma GCC unroll 4
        for (int i = 0; i < (ROWS + 2) / 3; i++) {
            third[i] += fold;
            asm("" : "+r"(third[i]));  // keep one pointer for three rows, not one for each
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; m++) {
        store(out + m * CHUNK, sums[m][0]);
        store(out + m * CHUNK + LANES, sums[m][1]);
    }
}

inline F32 first_of_fold(F32 values) { return values; }
inline I32 first_of_fold(I32 pairs) { return pairs & 0xffff; }

// What values are read from, and what is fetched while they are.
template <class E>
struct Values {
    const Group<E>* groups;
    const Group<E>* ahead;  // as many groups, whose keys are scored next
    int count;
    int depth;  // elements of a value, those that fill it up included

    // Elements before those of `vector` in each fold of tokens.
    ptrdiff_t offset(int vector) const { return ptrdiff_t(vector) * LANES * Element<E>::fold; }
};

// sums[ROWS][VECTORS] = sums * factors + weights[ROWS][tokens] * values, for VECTORS vectors from the given one on.
// A row of weights takes the room of CHUNK floats.
template <class E, int ROWS, int VECTORS>
void add_values(const E* weights, const Values<E>& values, int vector, const float* factors, float* out,
                ptrdiff_t stride) {
    constexpr int fold = Element<E>::fold;
    constexpr ptrdiff_t row = CHUNK * sizeof(float) / sizeof(E);
    const ptrdiff_t step = ptrdiff_t(values.depth) * fold;
    F32 sums[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) sums[m][v] = load(out + m * stride + v * LANES) * factors[m];

    auto add = [&](const E* at, const E* from, auto keep) __attribute__((always_inline)) {
        decltype(load_panel(from)) columns[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) columns[v] = keep(load_panel(from + v * LANES * fold));
#pragma GCC unroll 8
        for (int m = 0; m < ROWS; m++) {
            auto x = Element<E>::spread(at + m * row);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) sums[m][v] = Element<E>::dot(sums[m][v], x, columns[v]);
        }
    };
    for (int g = 0; g < values.count; g++) {
        const Group<E>& group = values.groups[g];
        const E* from = group.values + values.offset(vector);
        const char* ahead = (const char*)values.ahead[g].keys + ptrdiff_t(vector) * LANES / fold * 64;
        const E* at = weights + g * LANES;
        const E* end = at + group.tokens / fold * fold;
        for (; at < end; at += fold, from += step) {
            if constexpr (ROWS < VALUE_ROWS) {
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++, ahead += 64) prefetch_to_l2(ahead);
            }
            add(at, from, [](auto x) { return x; });
        }
        if (group.tokens % fold) add(at, from, [](auto x) { return first_of_fold(x); });
    }
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) store(out + m * stride + v * LANES, sums[m][v]);
}

template <class E>
using Score = void (*)(const E*, ptrdiff_t, const Group<E>*, const Group<E>*, int, float*);
template <class E>
using AddValues = void (*)(const E*, const Values<E>&, int, const float*, float*, ptrdiff_t);

template <class E, int... I>
constexpr std::array<Score<E>, sizeof...(I)> scores_of(std::integer_sequence<int, I...>) {
    return {score<E, I + 1>...};
}
template <class E, int... I>
constexpr std::array<AddValues<E>, sizeof...(I)> add_values_of(std::integer_sequence<int, I...>) {
    return {add_values<E, I / VALUE_VECTORS + 1, I % VALUE_VECTORS + 1>...};
}

template <class E>
inline constexpr auto SCORE = scores_of<E>(std::make_integer_sequence<int, MAX_ROWS>{});
template <class E>
inline constexpr auto ADD_VALUES = add_values_of<E>(std::make_integer_sequence<int, VALUE_ROWS * VALUE_VECTORS>{});

// 2^x for what is then rounded to E.
template <class E>
inline F32 weight_of(F32 x) {
    return exp2(x);
}

#if defined(__AVX512F__)
// To 1e-4, a twentieth of what rounding to bf16 does to it: a polynomial of the third degree.
template <>
inline F32 weight_of<bf16>(F32 x) {
    F32 n = round_to_int(x), f = x - n;
    F32 p = splat(0.05592078f);
    p = p * f + 0.24263103f;
    p = p * f + 0.69312114f;
    p = p * f + 0.99992486f;
    return (F32)_mm512_scalef_ps((__m512)p, (__m512)n);
}
#endif

}  // namespace conch
