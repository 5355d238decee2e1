// Memory of a step, and the rows of it that are worked on together.
#pragma once

#include "buffer.h"
#include "decoder_spec.h"
#include "kv_ahead.h"
#include "quantised.h"
#include "team.h"

namespace conch {

// What rows need on their way through the products of a layer, and nobody after that.
template <class E>
struct Scratch {
    Buffer<float> block;      // [R, hidden], what a block adds to the stream where that is normalised first
    Buffer<float> qkv;        // [R, (H + 2 K) D]
    Buffer<E> normed;         // [R, hidden]
    Buffer<E> inner;          // [R, inner]
    QuantisedRows quantised;  // a left operand of weights that are

    void fit(const DecoderSpec& spec, size_t rows) {
        block.fit(rows * spec.hidden);
        qkv.fit(rows * (spec.heads + 2 * spec.kv_heads) * spec.head_size);
        normed.fit(rows * spec.hidden);
        inner.fit(rows * spec.inner);
    }
};

// What each member of the team has to itself.
template <class E>
struct Own {
    Team alone{1};
    Scratch<E> scratch;  // for strips, and for few rows
    AttentionScratch attention;
    KvAhead later;
    Seen seen;
};

// Rows of a step, who works on them, and with what.
template <class E>
struct Strip {
    Crew crew;
    Own<E>& own;  // of the member that looks at it
    int first, count;
    float* stream;  // [count, hidden]
    E* query;       // [count, H D]
    E* attended;    // [count, H D]
    Scratch<E>& scratch;
};

// How many strips the rows of a step are cut into. Few rows stay together, and all members share each product. Of
// many, each member takes a strip through all that a layer does between one attention and the next: what is made of
// its rows stays in the member's own caches, and nobody waits. A strip is long enough that its products hide
// the reading of weights.
class Strips {
   public:
    Strips(int rows, int members) : rows_(rows), tiles_(ceil_div(rows, MAX_ROWS)) {
        const int turns = rows / (members * STRIP_ROWS);
        count_ = turns < LEAST_TURNS ? 1 : members * turns;
    }

    int count() const { return count_; }
    int begin(int strip) const { return std::min(rows_, int(int64_t(tiles_) * strip / count_) * MAX_ROWS); }
    int longest() const { return std::min(rows_, ceil_div(tiles_, count_) * MAX_ROWS); }

   private:
    static constexpr int STRIP_ROWS = 96;
    static constexpr int LEAST_TURNS = 2;

    int rows_, tiles_, count_;
};

// All memory of a step; grows to the largest one seen.
template <class E>
struct Workspace {
    Buffer<float> stream;  // [T, hidden], the residual stream
    Buffer<E> query;       // [T, H D]
    Buffer<E> attended;    // [T, H D]
    Scratch<E> shared;     // of what all members work on together

    void fit(const DecoderSpec& spec, const Step& step, int members) {
        const size_t tokens = step.rows.tokens, wide = spec.heads * spec.head_size;
        stream.fit(tokens * spec.hidden);
        query.fit(tokens * wide);
        attended.fit(tokens * wide);
        shared.fit(spec, Strips(tokens, members).count() == 1 ? tokens : step.num_logit_rows);
    }

    // All rows, for all members together.
    Strip<E> whole(Crew all, Own<E>& own, int rows) {
        return {all, own, 0, rows, stream.data(), query.data(), attended.data(), shared};
    }

    // Some rows, for a member alone.
    Strip<E> part(const DecoderSpec& spec, Own<E>& own, int first, int last) {
        const ptrdiff_t wide = spec.heads * spec.head_size;
        return {Crew{own.alone, 0},
                own,
                first,
                last - first,
                stream.data() + ptrdiff_t(first) * spec.hidden,
                query.data() + first * wide,
                attended.data() + first * wide,
                own.scratch};
    }
};

}  // namespace conch
