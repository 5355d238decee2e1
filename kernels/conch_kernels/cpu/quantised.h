// Products with quantised weights: whole numbers inside a group of GROUP, fp32 between groups.
//
// A panel is one group after the other, each in one piece:
//   scales  fp16 [PANEL]
//   minima  fp16 [PANEL], U4M only
//   U8      bytes [8 steps][2][LANES][4]: a step is four numbers down each column
//   U4, U4M bytes [4][2][LANES][4]: the low halves are step i, the high halves step i + 4
// A weight is scale * (number - zero point), the zero point being 128 in U8 and 8 in U4; in U4M it is
// scale * number + minimum. The rows on the left are quantised as they come, a scale for each group: one
// large activation then spoils 31 others, not its whole row.
#pragma once

#include <atomic>
#include <mutex>

#include "buffer.h"
#include "matrix.h"
#include "team.h"

namespace conch {

constexpr int STEPS = GROUP / 4;
constexpr int TILE_ROWS = 32;    // that share the unpacking of a group
constexpr int OWN_GROUPS = 128;  // that a member quantises sooner than it would wait for others

typedef int8_t I8 __attribute__((vector_size(16)));

// One group of one row.
struct LeftGroup {
    int8_t values[GROUP];
    float scale;
    float sum;                   // of the values, scaled
    int32_t start_u8, start_u4;  // -zero point * sum of the values: where the whole-number sum begins
};

// The left operand of a product, quantised: tiles of rows, in each [groups][rows of the tile].
class QuantisedLeft {
   public:
    QuantisedLeft(LeftGroup* memory, int count, int depth)
        : memory_(memory), count_(count), groups_(depth / GROUP) {}

    int count() const { return count_; }
    int groups() const { return groups_; }

    // Rows of the tile that holds `row`: the distance, in groups, between two groups of a row.
    int tile_rows(int row) const { return std::min(TILE_ROWS, count_ - row / TILE_ROWS * TILE_ROWS); }

    LeftGroup* at(int row, int group) const {
        int first = row / TILE_ROWS * TILE_ROWS;
        return memory_ + size_t(first) * groups_ + size_t(group) * tile_rows(row) + (row - first);
    }

   private:
    LeftGroup* memory_;
    int count_, groups_;
};

// Memory for left operands, one at a time.
class QuantisedRows {
   public:
    // Makes room. All members of a team may come here together, once nobody uses what was given out before.
    QuantisedLeft fit(int count, int depth) {
        size_t wanted = size_t(count) * (depth / GROUP);
        if (room_.load(std::memory_order_acquire) < wanted) {
            std::lock_guard lock(growing_);
            if (room_.load(std::memory_order_relaxed) < wanted) {
                memory_.fit(wanted);
                room_.store(wanted, std::memory_order_release);
            }
        }
        return {memory_.data(), count, depth};
    }

   private:
    Buffer<LeftGroup> memory_;
    std::atomic<size_t> room_{0};
    std::mutex growing_;
};

inline void store_bytes(int8_t* to, I32 v) {
#if defined(__AVX512F__)
    __m128i packed = _mm512_cvtepi32_epi8((__m512i)v);
#else
    I8 packed = __builtin_convertvector(v, I8);
#endif
    std::memcpy(to, &packed, sizeof packed);
}

inline int32_t sum(I32 v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)v);
#else
    int32_t total = 0;
    for (int i = 0; i < LANES; i++) total += v[i];
    return total;
#endif
}

// The largest of non-negative floats; as whole numbers, so that NaN comes out if one is among them.
inline float peak_of(F32 v) {
    float best;
#if defined(__AVX512F__)
    int32_t bits = _mm512_reduce_max_epi32((__m512i)v);
#else
    I32 all = (I32)v;
    int32_t bits = all[0];
    for (int i = 1; i < LANES; i++) bits = std::max(bits, all[i]);
#endif
    std::memcpy(&best, &bits, sizeof best);
    return best;
}

template <class E>
inline void quantise_group(const E* values, LeftGroup* to) {
    F32 left = load(values), right = load(values + LANES);
    I32 left_bits = (I32)left & 0x7fffffff, right_bits = (I32)right & 0x7fffffff;
    float peak = peak_of((F32)(left_bits > right_bits ? left_bits : right_bits));
    float inverse = peak > 1e-30f ? 127.f / peak : 0.f;
    I32 low = __builtin_convertvector(round_to_int(left * inverse), I32);
    I32 high = __builtin_convertvector(round_to_int(right * inverse), I32);
    store_bytes(to->values, low);
    store_bytes(to->values + LANES, high);
    int32_t total = sum(low + high);
    to->scale = peak * (1.f / 127.f);  // a NaN or an infinity among the values stays visible in here
    to->sum = to->scale * total;
    to->start_u8 = -128 * total;
    to->start_u4 = -8 * total;
}

inline F32 half_to_float(U32 half) {
    F32 magnitude = (F32)((half & 0x7fff) << 13) * 0x1p112f;
    return (F32)((U32)magnitude | ((half & 0x8000) << 16));
}

inline F32 load_half(const char* p) {
#if defined(__AVX512F__)
    return (F32)_mm512_cvtph_ps(load_as<__m256i>(p));
#else
    return half_to_float(__builtin_convertvector(load_as<U16>(p), U32));
#endif
}

// Adds, in each lane, the products of four unsigned bytes of `weights` with four signed bytes of `values`.
inline I32 add_products(I32 sum, I32 weights, I32 values) {
#if defined(__AVX512VNNI__)
    return (I32)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)values);
#else
    for (int shift = 0; shift < 32; shift += 8) {
        sum += (I32)((U32)weights >> shift & 255) * ((I32)((U32)values << (24 - shift)) >> 24);
    }
    return sum;
#endif
}

// One group of a panel, unpacked.
template <int FORMAT>
struct WeightGroup {
    static constexpr bool MINIMA = FORMAT == U4M;
    static constexpr int NUMBERS = (MINIMA ? 2 : 1) * PANEL * int(sizeof(uint16_t));  // where they begin
    static constexpr int BYTES = NUMBERS + PANEL * (FORMAT == U8 ? GROUP : GROUP / 2);

    I32 numbers[STEPS][2];
    F32 scales[2], minima[2];

    explicit WeightGroup(const char* group) {
        for (int half = 0; half < 2; half++) {
            scales[half] = load_half(group + half * 32);
            if constexpr (MINIMA) minima[half] = load_half(group + 64 + half * 32);
            const char* words = group + NUMBERS + half * 64;
            if constexpr (FORMAT == U8) {
                for (int i = 0; i < STEPS; i++) numbers[i][half] = load_as<I32>(words + i * 128);
            } else {
                for (int i = 0; i < STEPS / 2; i++) {
                    I32 both = load_as<I32>(words + i * 128);
                    numbers[i][half] = both & 0x0f0f0f0f;
                    numbers[i + STEPS / 2][half] = both >> 4 & 0x0f0f0f0f;
                }
            }
        }
    }

    static int32_t start(const LeftGroup& left) {
        if constexpr (FORMAT == U8) return left.start_u8;
        return FORMAT == U4 ? left.start_u4 : 0;
    }

    // sums[ROWS][PANEL] += the products of ROWS rows with this group.
    template <int ROWS>
    void add(const LeftGroup* left, float* sums) const {
        I32 whole[ROWS][2];
#pragma GCC unroll 4
        for (int m = 0; m < ROWS; m++) whole[m][0] = whole[m][1] = I32{} + start(left[m]);
#pragma GCC unroll 8
        for (int i = 0; i < STEPS; i++) {
#pragma GCC unroll 4
            for (int m = 0; m < ROWS; m++) {
                I32 values = I32{} + load_as<int32_t>(left[m].values + 4 * i);
                whole[m][0] = add_products(whole[m][0], numbers[i][0], values);
                whole[m][1] = add_products(whole[m][1], numbers[i][1], values);
            }
        }
#pragma GCC unroll 4
        for (int m = 0; m < ROWS; m++) {
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                float* sum = sums + m * PANEL + half * LANES;
                F32 product = __builtin_convertvector(whole[m][half], F32) * left[m].scale;
                F32 total = load(sum) + product * scales[half];
                if constexpr (MINIMA) total += minima[half] * left[m].sum;
                store(sum, total);
            }
        }
    }
};

// sums[rows][PANEL] = rows of one tile times one panel. `left` are the groups of its first row, `stride` apart;
// `ahead` is the panel that is wanted next.
template <int FORMAT>
void quantised_tile(const LeftGroup* left, int stride, int rows, const char* panel, int groups,
                    const char* ahead, float* sums) {
    using Weights = WeightGroup<FORMAT>;
    std::memset(sums, 0, sizeof(float) * rows * PANEL);
    for (int group = 0; group < groups; group++) {
        for (int line = 0; line < Weights::BYTES; line += 64) prefetch_to_l2(ahead + line);
        const Weights weights(panel);
        int m = 0;
        for (; m + 2 <= rows; m += 2) weights.template add<2>(left + m, sums + m * PANEL);
        if (m < rows) weights.template add<1>(left + m, sums + m * PANEL);
        left += stride;
        panel += Weights::BYTES;
        ahead += Weights::BYTES;
    }
}

using QuantisedTile = void (*)(const LeftGroup*, int, int, const char*, int, const char*, float*);

inline QuantisedTile quantised_tile_of(int format) {
    if (format == U8) return quantised_tile<U8>;
    return format == U4 ? quantised_tile<U4> : quantised_tile<U4M>;
}

// For each tile of left * weight: finish(first row, rows, first column, values [rows][PANEL]), of at most
// MAX_ROWS rows. To be called by all members of the team, which multiply with `after` next; returns when the whole
// product is done.
template <class Finish>
void multiply_quantised(Team& team, QuantisedLeft left, const Matrix& weight, const Matrix& after, Finish finish) {
    const Cut cut(left.count(), weight.num_panels(), team.size());
    const Onward onward(cut, weight, after, team.size());
    const size_t panel_bytes = weight.panel_bytes();
    const QuantisedTile tile = quantised_tile_of(weight.format);
    team.each(cut.items(), [&](int item) {
        alignas(64) float values[TILE_ROWS * PANEL];
        int first = item / cut.runs * cut.block_rows, last = std::min(left.count(), first + cut.block_rows);
        int panel = item % cut.runs * cut.run, end = std::min(cut.panels, panel + cut.run);
        for (; panel < end; panel++) {
            const char* weights = weight.panels + panel * panel_bytes;
            const char* ahead = panel + 1 < end ? weights + panel_bytes : onward.from(item);
            for (int row = first, rows; row < last; row += rows) {
                rows = std::min(last, (row / TILE_ROWS + 1) * TILE_ROWS) - row;
                tile(left.at(row, 0), left.tile_rows(row), rows, weights, left.groups(), ahead, values);
                ahead = weights;  // the next panel is on its way
                for (int m = 0; m < rows; m += MAX_ROWS) {
                    finish(row + m, std::min(MAX_ROWS, rows - m), panel * PANEL, values + m * PANEL);
                }
            }
        }
    });
}

// Fills groups [begin, end) of `to`, counted row by row.
template <class E>
void quantise_range(Left<E> left, QuantisedLeft to, int begin, int end) {
    for (int i = begin; i < end; i++) {
        int row = i / to.groups(), group = i % to.groups();
        quantise_group(left.data + ptrdiff_t(row) * left.stride + group * GROUP, to.at(row, group));
    }
}

// Fills `to` from `left`. To be called by all members of the team.
template <class E>
void quantise_rows(Team& team, Left<E> left, QuantisedLeft to) {
    const int total = left.count * to.groups();
    const int chunk = std::max(GROUP, ceil_div(total, 8 * team.size()));
    team.each(ceil_div(total, chunk), [&](int item) {
        quantise_range(left, to, item * chunk, std::min(total, (item + 1) * chunk));
    });
}

// The same for rows that are still to be quantised. Where they are few each member does that for itself, which
// takes less time than waiting for the others.
template <class E, class Finish>
void multiply_quantised(Team& team, Left<E> left, QuantisedRows& scratch, const Matrix& weight,
                        const Matrix& after, Finish finish) {
    if (left.count * (weight.depth / GROUP) <= OWN_GROUPS) {
        LeftGroup own[OWN_GROUPS];
        QuantisedLeft rows(own, left.count, weight.depth);
        quantise_range(left, rows, 0, left.count * rows.groups());
        multiply_quantised(team, rows, weight, after, finish);
    } else {
        QuantisedLeft rows = scratch.fit(left.count, weight.depth);
        quantise_rows(team, left, rows);
        multiply_quantised(team, rows, weight, after, finish);
    }
}

}  // namespace conch
