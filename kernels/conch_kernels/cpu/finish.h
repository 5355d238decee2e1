// What becomes of a product: values [rows][PANEL] of columns `column` and on.
#pragma once

#include "decoder_spec.h"

namespace conch {

inline F32 biased(const Matrix& weight, const float* values, int column) {
    F32 x = load(values);
    return weight.bias ? x + load(weight.bias + column) : x;
}

// For each vector of it and its place in data [rows, columns]: put(place, vector). Columns are a multiple of LANES.
template <class Put>
auto into(const Matrix& weight, float* data, Put put) {
    return [&weight, data, put](int first, int rows, int column, const float* values) {
        const int width = std::min(PANEL, weight.columns - column);
        for (int row = 0; row < rows; row++)
            for (int i = 0; i < width; i += LANES)
                put(data + ptrdiff_t(first + row) * weight.columns + column + i,
                    biased(weight, values + row * PANEL + i, column + i));
    };
}

// Keeps it.
inline auto keep(const Matrix& weight, float* data) {
    return into(weight, data, [](float* at, F32 x) { store(at, x); });
}

// Adds it, scaled, to what is there.
inline auto add(const Matrix& weight, float scale, float* data) {
    return into(weight, data, [scale](float* at, F32 x) { store(at, load(at) + x * scale); });
}

inline F32 activate(int kind, F32 x) {
    switch (kind) {
        case SILU: return x * sigmoid(x);
        case GELU_TANH: return x * sigmoid(1.5957691f * (x + 0.044715f * x * x * x));
        case RELU: return max(x, F32{});
        default: {
            F32 result = {};
            for (int i = 0; i < LANES; i++) result[i] = 0.5f * x[i] * (1.f + std::erf(x[i] * 0.70710678f));
            return result;
        }
    }
}

// Gate and up lie side by side in it: keeps activation(gate) * up in out [rows, columns / 2].
template <class E>
auto activated(const Matrix& weight, int kind, E* out) {
    return [&weight, kind, out](int first, int rows, int column, const float* values) {
        for (int row = 0; row < rows; row++, values += PANEL) {
            F32 gate = activate(kind, biased(weight, values, column));
            store(out + (ptrdiff_t(first + row) * weight.columns + column) / 2,
                  gate * biased(weight, values + LANES, column + LANES));
        }
    };
}

}  // namespace conch
