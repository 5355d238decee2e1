// The largest logit of each row, found while logits are made.
//
// Each member of a team keeps, for each row, the best value of every lane and where it saw it; the members' finds
// are compared once all are through. Of equals the first column wins, and a row with a NaN has NaN for its best.
#pragma once

#include "buffer.h"
#include "simd.h"

namespace conch {

struct Likeliest {
    float value;
    int64_t column;
};

// What one member has seen.
class Seen {
   public:
    void begin(int rows) {
        values_.fit(size_t(rows) * LANES);
        columns_.fit(size_t(rows) * LANES);
        for (int row = 0; row < rows; row++) {
            store(value(row), splat(-INFINITY));
            std::memset(column(row), 0, sizeof(I32));
        }
    }

    // Columns come in ascending order. Lanes from `width` on do not count.
    void see(int row, int first, F32 x, int width = LANES) {
        if (width < LANES) x = LANE_NUMBERS < width ? x : splat(-INFINITY);
        const F32 best = load(value(row));
        const I32 columns = load_as<I32>(column(row));
        const I32 better = (x > best) | (x != x);  // once NaN, always NaN: nothing is greater
        store(value(row), better ? x : best);
        const I32 now = better ? first + LANE_NUMBERS : columns;
        std::memcpy(column(row), &now, sizeof now);
    }

    // Takes over what this member has seen of a row where it is better.
    void improve(int row, Likeliest& best) const {
        const float* values = values_.data() + ptrdiff_t(row) * LANES;
        const int32_t* columns = columns_.data() + ptrdiff_t(row) * LANES;
        for (int i = 0; i < LANES; i++) {
            bool first = values[i] == best.value && columns[i] < best.column;
            if (values[i] > best.value || first || values[i] != values[i]) best = {values[i], columns[i]};
        }
    }

   private:
    float* value(int row) { return values_.data() + ptrdiff_t(row) * LANES; }
    int32_t* column(int row) { return columns_.data() + ptrdiff_t(row) * LANES; }

    Buffer<float> values_;
    Buffer<int32_t> columns_;
};

}  // namespace conch
