// Normalisation of rows.
#pragma once

#include "simd.h"

namespace conch {

// Born in Python (conch_kernels.cpu.native.Norm).
struct Norm {
    const float* weight;  // [size]; null leaves a row as it is
    float eps;
    int32_t reserved;
};

// RMSNorm: calls put(i, values of lanes i..i+15) for the normalised row. `size` is a multiple of LANES.
template <class Put>
inline void normalise(const Norm& norm, const float* row, int size, Put put) {
    if (!norm.weight) {
        for (int i = 0; i < size; i += LANES) put(i, load(row + i));
        return;
    }
    F32 squares = {};
    for (int i = 0; i < size; i += LANES) squares += load(row + i) * load(row + i);
    const float factor = 1.f / std::sqrt(sum(squares) / size + norm.eps);
    for (int i = 0; i < size; i += LANES) put(i, load(row + i) * factor * load(norm.weight + i));
}

}  // namespace conch
