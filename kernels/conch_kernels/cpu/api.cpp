// What Python calls (conch_kernels.cpu.native): plain functions, addresses in and out.
#include <sys/mman.h>

#include "decoder.h"
#include "pack.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace conch;

// Sizes of the structures that Python mirrors, so that it can tell when it does not.
EXPORT void conch_sizes(int64_t* sizes) {
    const int64_t all[] = {sizeof(Matrix), sizeof(Norm), sizeof(Layer), sizeof(Entry), sizeof(DecoderSpec), sizeof(Step), sizeof(Likeliest)};
    std::copy(std::begin(all), std::end(all), sizes);
}

EXPORT Team* conch_team_new(int size) { return new Team(size); }

EXPORT void conch_team_free(Team* team) { delete team; }

// Ask for large pages under [begin, begin + bytes): weights and KV are read from end to end in every step. With
// `in_use`, also for what has small pages already. The system may decline.
EXPORT void conch_prefer_large_pages(void* begin, int64_t bytes, int in_use) {
#if defined(MADV_HUGEPAGE)
    constexpr int COLLAPSE = 25;  // MADV_COLLAPSE, from Linux 6.1 on
    const uintptr_t page = 1 << 21, first = (uintptr_t(begin) + page - 1) / page * page;
    const uintptr_t last = (uintptr_t(begin) + bytes) / page * page;
    if (first >= last) return;
    madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
    if (in_use) madvise(reinterpret_cast<void*>(first), last - first, COLLAPSE);
#endif
}

// source [columns, depth] -> panels; both of the element type that `format` names.
EXPORT void conch_pack(Team* team, const void* source, void* panels, int columns, int depth, int format) {
    const int count = ceil_div(columns, PANEL);
    team->run([&](int) {
        team->each(count, [&](int panel) {
            const ptrdiff_t offset = ptrdiff_t(panel) * PANEL * depth;
            if (format == FP32)
                pack_panel(static_cast<const float*>(source), columns, depth, panel,
                           static_cast<float*>(panels) + offset);
            else
                pack_panel(static_cast<const bf16*>(source), columns, depth, panel,
                           static_cast<bf16*>(panels) + offset);
        });
    });
}

// product [rows, columns] fp32 = left [rows, depth] * weight; for tests and benchmarks of one matrix.
EXPORT void conch_multiply(Team* team, const void* left, const Matrix* weight, float* product, int rows, int element) {
    const int columns = weight->columns;
    auto keep = [&](int first, int count, int column, const float* values) {
        for (int row = 0; row < count; row++)
            std::copy_n(values + row * PANEL, std::min(PANEL, columns - column),
                        product + ptrdiff_t(first + row) * columns + column);
    };
    QuantisedRows quantised;
    team->run([&](int) {
        KvAhead none;
        if (weight->format == FP32)
            multiply(*team, Left<float>{static_cast<const float*>(left), weight->depth, rows}, *weight, *weight,
                     none, keep);
        else if (weight->format == BF16)
            multiply(*team, Left<bf16>{static_cast<const bf16*>(left), weight->depth, rows}, *weight, *weight,
                     none, keep);
        else if (element == FP32)
            multiply_quantised(*team, Left<float>{static_cast<const float*>(left), weight->depth, rows}, quantised,
                               *weight, *weight, keep);
        else
            multiply_quantised(*team, Left<bf16>{static_cast<const bf16*>(left), weight->depth, rows}, quantised,
                               *weight, *weight, keep);
    });
}

EXPORT void* conch_decoder_new(const DecoderSpec* spec) {
    if (spec->element == FP32) return new Decoder<float>(*spec);
    return new Decoder<bf16>(*spec);
}

EXPORT void conch_decoder_free(void* decoder, int element) {
    if (element == FP32)
        delete static_cast<Decoder<float>*>(decoder);
    else
        delete static_cast<Decoder<bf16>*>(decoder);
}

EXPORT void conch_decoder_run(void* decoder, int element, Team* team, const Step* step) {
    if (element == FP32)
        static_cast<Decoder<float>*>(decoder)->run(*team, *step);
    else
        static_cast<Decoder<bf16>*>(decoder)->run(*team, *step);
}
