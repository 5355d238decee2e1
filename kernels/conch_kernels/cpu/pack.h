// Packing of fp32 and bf16 weights into panels; see matrix.h.
#pragma once

#include "matrix.h"

namespace conch {

// source [columns, depth] row-major -> one panel, with zeros for columns past the last.
template <class E>
void pack_panel(const E* source, int columns, int depth, int panel, E* out) {
    constexpr int fold = Element<E>::fold;
    for (int lane = 0; lane < PANEL; lane++) {
        const int column = panel * PANEL + lane;
        const E* from = source + ptrdiff_t(column) * depth;
        E* to = out + lane / LANES * LANES * fold + lane % LANES * fold;
        for (int k = 0; k < depth; k++) to[k / fold * PANEL * fold + k % fold] = column < columns ? from[k] : E{};
    }
}

}  // namespace conch
