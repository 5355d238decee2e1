// Parts of a decoder by themselves, for tests and benchmarks.
#include "gather.h"
#include "matmul.h"
#include "workspace.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace conch;

// out [depth] fp32 = one column of a matrix.
EXPORT void conch_gather_column(const Matrix* matrix, int column, float* out) {
    gather_column(*matrix, column, out);
}

// `rounds` times: the products of one bf16 operand with all the matrices, one after the other. Each reads `rows`
// rows of its depth from the front of `left` and writes to `product`, which has room for the largest.
EXPORT void conch_multiply_all(Team* team, const Matrix* matrices, int count, const void* left, int rows,
                               float* product, int rounds) {
    QuantisedRows quantised;
    auto multiply_one = [&](const Matrix& weight) {
        KvAhead none;
        const Left<bf16> operand{static_cast<const bf16*>(left), weight.depth, rows};
        const int stride = weight.num_panels() * PANEL;
        auto keep = [&](int first, int some, int column, const float* values) {
            for (int row = 0; row < some; row++)
                std::copy_n(values + row * PANEL, PANEL, product + ptrdiff_t(first + row) * stride + column);
        };
        if (weight.format == BF16)
            multiply(*team, operand, weight, weight, none, keep);
        else
            multiply_quantised(*team, operand, quantised, weight, weight, keep);
    };
    for (int round = 0; round < rounds; round++) {
        team->run([&](int) { std::for_each(matrices, matrices + count, multiply_one); });
    }
}

// How many strips a step has, and in `begins`, where that is not null, at which rows they begin and the last one ends.
EXPORT int conch_strips(int rows, int members, int32_t* begins) {
    const Strips strips(rows, members);
    for (int i = 0; begins && i <= strips.count(); i++) begins[i] = strips.begin(i);
    return strips.count();
}
