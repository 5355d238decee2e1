// Products of a few or many rows with a packed matrix of fp32 or bf16.
//
// A tile multiplies up to MAX_ROWS rows with one panel and holds all its sums in registers; while it does, it
// fetches the panel that comes next, because for a few rows the time goes into reading weights. Many rows are
// taken in blocks that stay in the second-level cache.
#pragma once

#include <array>
#include <utility>

#include "kv_ahead.h"
#include "matrix.h"
#include "team.h"

namespace conch {

// So few rows do nothing but read: weights that pass by the larger caches leave there what the rest of the program
// will look for after the step.
constexpr int FEW_ROWS = 4;
constexpr int ONCE_AHEAD = 6144;

// So many rows keep a core busy enough that memory has time for something else.
constexpr int BUSY_ROWS = MAX_ROWS * 3 / 4;

// What is fetched while a panel is read.
struct Fetch {
    const char* panel;  // the one that is read next, from here on
    int pace;           // bytes of it with each fold of this one
    KvAhead& later;
};

// out[ROWS][PANEL] = rows of a times one panel. A few rows read it as it comes, and go on with the next; more fetch
// that on the way, and many fetch what comes later, too.
template <class E, int ROWS>
void tile(const E* a, ptrdiff_t stride, const E* panel, int depth, const Fetch& fetch, float* out) {
    constexpr int fold = Element<E>::fold;
    const char* ahead = fetch.panel;
    [[maybe_unused]] const int pace = fetch.pace;
    F32 sums[ROWS][2] = {};
    const E* third[(ROWS + 2) / 3];  // every third row; the two after it are reached by the stride
#pragma GCC unroll 4
    for (int i = 0; i < (ROWS + 2) / 3; i++) third[i] = a + 3 * i * stride;
    [[maybe_unused]] const char* piece = nullptr;
    [[maybe_unused]] const char* once = reinterpret_cast<const char*>(panel) + ONCE_AHEAD;
    [[maybe_unused]] const int turn = depth - ONCE_AHEAD / (PANEL * int(sizeof(E)));
    for (int k = 0; k < depth; k += fold) {
        auto left = load_panel(panel), right = load_panel(panel + LANES * fold);
        panel += PANEL * fold;
        if constexpr (ROWS <= FEW_ROWS) {
            if (k == turn) once = ahead;
            for (int line = 0; line < PANEL * fold * int(sizeof(E)); line += 64) prefetch_once(once + line);
            once += PANEL * fold * sizeof(E);
        } else {
            prefetch_to_l2(ahead);
            if constexpr (ROWS <= MAX_ROWS / 2) {  // a panel is read once: fetch all of the next one now
                prefetch_to_l2(ahead + 64);
                ahead += 64;
            }
            ahead += pace;
        }
        if constexpr (ROWS >= BUSY_ROWS) {
            if (k % (KvAhead::LINES * fold) == 0) piece = fetch.later.piece();
            prefetch_to_l2(piece);
            piece += 64;
        }
#pragma GCC unroll 16
        for (int m = 0; m < ROWS; m++) {
            auto x = Element<E>::spread(third[m / 3] + (m % 3) * stride);
            sums[m][0] = Element<E>::dot(sums[m][0], x, left);
            sums[m][1] = Element<E>::dot(sums[m][1], x, right);
        }
#pragma GCC unroll 4
        for (int i = 0; i < (ROWS + 2) / 3; i++) {
            third[i] += fold;
            asm("" : "+r"(third[i]));  // keep one pointer for three rows, not one for each
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; m++) {
        store(out + m * PANEL, sums[m][0]);
        store(out + m * PANEL + LANES, sums[m][1]);
    }
}

template <class E>
using Product = void (*)(const E*, ptrdiff_t, const E*, int, const Fetch&, float*);

template <class E, int... ROWS>
constexpr std::array<Product<E>, sizeof...(ROWS)> products(std::integer_sequence<int, ROWS...>) {
    return {tile<E, ROWS + 1>...};
}

template <class E>
inline constexpr auto PRODUCTS = products<E>(std::make_integer_sequence<int, MAX_ROWS>{});

// For each tile of left * weight: finish(first row, rows, first column, values [rows][PANEL]). To be called by
// all members of the team, which multiply with `after` next; returns when the whole product is done.
template <class E, class Finish>
void multiply(Team& team, Left<E> left, const Matrix& weight, const Matrix& after, KvAhead& later, Finish finish) {
    const Cut cut(left.count, weight.num_panels(), team.size());
    const Onward onward(cut, weight, after, team.size());
    const size_t panel_bytes = weight.panel_bytes();
    team.each(cut.items(), [&](int item) {
        alignas(64) float values[MAX_ROWS * PANEL];
        int first = item / cut.runs * cut.block_rows, last = std::min(left.count, first + cut.block_rows);
        int panel = item % cut.runs * cut.run, end = std::min(cut.panels, panel + cut.run);
        int tiles = ceil_div(last - first, MAX_ROWS);
        const int pace = std::min(64, ceil_div(PANEL * Element<E>::fold * int(sizeof(E)), tiles));
        for (; panel < end; panel++) {
            const char* weights = weight.panels + panel * panel_bytes;
            Fetch fetch{panel + 1 < end ? weights + panel_bytes : onward.from(item), pace, later};
            for (int i = 0; i < tiles; i++) {
                int row = first + (last - first) * i / tiles;
                int rows = first + (last - first) * (i + 1) / tiles - row;
                PRODUCTS<E>[rows - 1](left.data + ptrdiff_t(row) * left.stride, left.stride,
                                      reinterpret_cast<const E*>(weights), weight.depth, fetch, values);
                fetch.panel += size_t(weight.depth / Element<E>::fold) * pace;
                finish(row, rows, panel * PANEL, values);
            }
        }
    });
}

}  // namespace conch
