// One column of a packed matrix, whatever its format: a row of the embedding where that is also the head.
#pragma once

#include "quantised.h"

namespace conch {

template <class E, class T>
void gather_elements(const T* panel, int column, int depth, E* out) {
    constexpr int fold = Element<T>::fold;
    const T* first = panel + column * fold;
    for (int k = 0; k < depth; k++) store_one(out + k, to_float(first[k / fold * PANEL * fold + k % fold]));
}

inline float half_at(const char* p) { return half_to_float(U32{} + load_as<uint16_t>(p))[0]; }

template <int FORMAT, class E>
void gather_groups(const char* panel, int column, int groups, E* out) {
    using Weights = WeightGroup<FORMAT>;
    constexpr int zero = FORMAT == U8 ? 128 : FORMAT == U4 ? 8 : 0;
    for (int group = 0; group < groups; group++, panel += Weights::BYTES, out += GROUP) {
        float scale = half_at(panel + 2 * column);
        float minimum = Weights::MINIMA ? half_at(panel + 2 * (PANEL + column)) : 0.f;
        const uint8_t* numbers = reinterpret_cast<const uint8_t*>(panel) + Weights::NUMBERS + 4 * column;
        for (int k = 0; k < GROUP; k++) {
            int step = k / 4, byte = k % 4, number;
            if constexpr (FORMAT == U8) {
                number = numbers[step * 4 * PANEL + byte];
            } else {
                int both = numbers[step % (STEPS / 2) * 4 * PANEL + byte];
                number = step < STEPS / 2 ? both & 15 : both >> 4;
            }
            store_one(out + k, scale * float(number - zero) + minimum);
        }
    }
}

// out[depth] = a column of the matrix as it is stored (without bias).
template <class E>
void gather_column(const Matrix& matrix, int column, E* out) {
    const char* panel = matrix.panels + size_t(column / PANEL) * matrix.panel_bytes();
    const int in_panel = column % PANEL, groups = matrix.depth / GROUP;
    switch (matrix.format) {
        case FP32: return gather_elements(reinterpret_cast<const float*>(panel), in_panel, matrix.depth, out);
        case BF16: return gather_elements(reinterpret_cast<const bf16*>(panel), in_panel, matrix.depth, out);
        case U8: return gather_groups<U8>(panel, in_panel, groups, out);
        case U4: return gather_groups<U4>(panel, in_panel, groups, out);
        default: return gather_groups<U4M>(panel, in_panel, groups, out);
    }
}

}  // namespace conch
