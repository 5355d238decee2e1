// A packed weight matrix, the rows that it is multiplied with, and how the work of a product is cut.
//
// A weight matrix [columns, depth] (as `nn.Linear` keeps it) is packed once into panels of PANEL columns, each
// in one piece. Panels of fp32 and bf16 are [depth / fold][2][LANES][fold] elements; those of quantised weights
// are described in quantised.h.
#pragma once

#include <algorithm>
#include <cstddef>

#include "simd.h"

namespace conch {

constexpr int PANEL = 2 * LANES;
constexpr int GROUP = 32;

#if defined(__AVX512F__)
constexpr int MAX_ROWS = 12;  // 24 sums, 2 weights and a few to spare of 32 registers
#else
constexpr int MAX_ROWS = 2;
#endif

// What a panel is made of: elements, or groups of GROUP numbers down a column that share a scale (and a minimum,
// in U4M).
enum Format : int32_t { FP32 = 0, BF16 = 1, U8 = 2, U4 = 3, U4M = 4 };

// A packed weight matrix; born in Python (conch_kernels.cpu.native.Matrix, the same fields in the same order).
struct Matrix {
    const char* panels;
    const float* bias;   // [columns] or null
    int32_t depth;       // of the product; a multiple of 2, or of GROUP where quantised
    int32_t columns;     // without those that fill up the last panel
    int32_t format;
    int32_t reserved;

    int num_panels() const { return ceil_div(columns, PANEL); }

    size_t panel_bytes() const {
        switch (format) {
            case FP32: return size_t(depth) * PANEL * sizeof(float);
            case BF16: return size_t(depth) * PANEL * sizeof(bf16);
            case U8: return size_t(depth) / GROUP * PANEL * (GROUP + sizeof(uint16_t));
            case U4: return size_t(depth) / GROUP * PANEL * (GROUP / 2 + sizeof(uint16_t));
            default: return size_t(depth) / GROUP * PANEL * (GROUP / 2 + 2 * sizeof(uint16_t));
        }
    }
};

// The left operand: `count` rows of `stride` elements.
template <class E>
struct Left {
    const E* data;
    int stride;
    int count;

    Left part(int first, int rows) const { return {data + ptrdiff_t(first) * stride, stride, rows}; }
};

// How the work of one product is cut: blocks of rows, and runs of panels within a block.
struct Cut {
    static constexpr int BLOCK_ROWS = 192;
    int rows, blocks, block_rows, panels, run, runs;

    Cut(int rows, int panels, int members) : rows(rows), panels(panels) {
        blocks = ceil_div(rows, BLOCK_ROWS);
        block_rows = round_up(ceil_div(rows, blocks), blocks > 1 ? MAX_ROWS : 1);
        blocks = ceil_div(rows, block_rows);
        const int wanted = members == 1 ? 1 : ceil_div(8 * members, blocks);
        const int longest = ceil_div(panels, wanted);  // items enough for members that are held up
        run = longest;
        for (int shorter = longest - 1; shorter && rows > MAX_ROWS; shorter--)  // fewer rows wait for memory
            if (share(shorter, members) < share(run, members)) run = shorter;
        runs = ceil_div(panels, run);
    }
    int items() const { return blocks * runs; }
    int first_panel(int item) const { return item % runs * run; }

   private:
    // The most panels that a member takes where all are as fast: a product of few runs is as slow as its last ones.
    int share(int run, int members) const { return ceil_div(blocks * ceil_div(panels, run), members) * run; }
};

// Where a member will most likely read on when it is through with an item of a product, so that it can fetch that:
// members take turns, and one product comes after the other.
class Onward {
   public:
    Onward(const Cut& cut, const Matrix& weight, const Matrix& after, int members)
        : cut_(cut),
          following_(cut.rows, after.num_panels(), members),
          weight_(weight),
          after_(after),
          members_(members) {}

    const char* from(int item) const {
        const int next = item + members_;
        if (next < cut_.items()) return at(weight_, cut_.first_panel(next));
        return at(after_, following_.first_panel(next - cut_.items()));
    }

   private:
    static const char* at(const Matrix& weight, int panel) { return weight.panels + panel * weight.panel_bytes(); }

    const Cut cut_, following_;
    const Matrix &weight_, &after_;
    const int members_;
};

}  // namespace conch
