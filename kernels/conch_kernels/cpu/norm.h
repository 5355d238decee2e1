// Normalisation of rows.
#pragma once

#include "simd.h"

namespace conch {

// Born in Python (conch_kernels.cpu.native.Norm).
struct Norm {
    const float* weight;  // [size]; null leaves a row as it is
    const float* bias;    // [size] or null
    float eps;
    int32_t centred;  // 0: divide by the root of the mean square (RMSNorm); 1: subtract the mean first (LayerNorm)
};

// Calls put(i, values of lanes i..i+15) for the normalised row. `size` is a multiple of LANES.
template <class Put>
inline void normalise(const Norm& norm, const float* row, int size, Put put) {
    if (!norm.weight) {
        for (int i = 0; i < size; i += LANES) put(i, load(row + i));
        return;
    }
    float mean = 0;
    if (norm.centred) {
        F32 total = {};
        for (int i = 0; i < size; i += LANES) total += load(row + i);
        mean = sum(total) / size;
    }
    F32 squares = {};
    for (int i = 0; i < size; i += LANES) {
        F32 x = load(row + i) - mean;
        squares += x * x;
    }
    float factor = 1.f / std::sqrt(sum(squares) / size + norm.eps);
    for (int i = 0; i < size; i += LANES) {
        F32 x = (load(row + i) - mean) * factor * load(norm.weight + i);
        put(i, norm.bias ? x + load(norm.bias + i) : x);
    }
}

}  // namespace conch
