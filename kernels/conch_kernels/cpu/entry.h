// The way into a head that drafts from a target's states (EAGLE, arXiv 2401.15077; EAGLE-3, arXiv 2503.01840).
//
// A slot of such a head is made of a state and of the token that follows. The state is the target's, which is
// there right after its step, or what the head itself has put out for the slot before.
#pragma once

#include "buffer.h"
#include "finish.h"
#include "matmul.h"

namespace conch {

template <class E>
class Entrance {
   public:
    explicit Entrance(const DecoderSpec& spec) : spec_(spec) {}

    void fit(const Step& step) {
        const size_t tokens = step.rows.tokens, hidden = spec_.hidden;
        joined_.fit(tokens * 2 * hidden);
        embedded_.fit(tokens * hidden);
        if (step.from_target) states_.fit(tokens * spec_.entry->fusing.depth);
    }

    // To be called by all members. Fills the stream [T, hidden]; returns what the layer reads, or no rows where it
    // reads the stream. `after` is the product that comes next.
    Left<E> join(Team& team, const Step& step, float* stream, const Matrix& after, KvAhead& later) {
        const bool joins_later = spec_.entry->embedding.weight;
        if (!joins_later) {
            fuse(team, pair(team, step), stream, after, later);
            return {};
        }
        if (step.from_target) fuse(team, narrow(team, step), stream, after, later);
        normalise_both(team, step, stream);
        return {joined_.data(), 2 * spec_.hidden, step.rows.tokens};
    }

   private:
    // The target's states, all of a token side by side.
    Left<E> narrow(Team& team, const Step& step) {
        const int wide = spec_.entry->fusing.depth;
        team.each(step.rows.tokens, [&](int token) {
            const float* from = step.given + ptrdiff_t(token) * wide;
            E* to = states_.data() + ptrdiff_t(token) * wide;
            for (int i = 0; i < wide; i += LANES) store(to + i, load(from + i));
        });
        return {states_.data(), wide, step.rows.tokens};
    }

    // The embedding and the state, side by side as they are.
    Left<E> pair(Team& team, const Step& step) {
        const int hidden = spec_.hidden;
        const Norm as_it_is = {};
        team.each(step.rows.tokens, [&](int token) {
            E* to = joined_.data() + ptrdiff_t(token) * 2 * hidden;
            std::copy_n(embedding(step, token), hidden, to);
            normalise(step.from_target ? spec_.entry->target : as_it_is, step.given + ptrdiff_t(token) * hidden, hidden,
                      [&](int i, F32 x) { store(to + hidden + i, x); });
        });
        return {joined_.data(), 2 * hidden, step.rows.tokens};
    }

    void fuse(Team& team, Left<E> left, float* stream, const Matrix& after, KvAhead& later) {
        const Matrix& weight = spec_.entry->fusing;
        multiply<E>(team, left, weight, after, later, keep(weight, stream));
    }

    // The embedding and the state, side by side, each normalised. The state is in the stream, or yet to come into it.
    void normalise_both(Team& team, const Step& step, float* stream) {
        const int hidden = spec_.hidden;
        team.each(step.rows.tokens, [&](int token) {
            E* to = joined_.data() + ptrdiff_t(token) * 2 * hidden;
            float* at = stream + ptrdiff_t(token) * hidden;
            float* wide = embedded_.data() + ptrdiff_t(token) * hidden;
            const E* narrow = embedding(step, token);
            for (int i = 0; i < hidden; i += LANES) store(wide + i, load(narrow + i));
            normalise(spec_.entry->embedding, wide, hidden, [&](int i, F32 x) { store(to + i, x); });
            if (!step.from_target) std::copy_n(step.given + ptrdiff_t(token) * hidden, hidden, at);
            normalise(spec_.entry->state, at, hidden, [&](int i, F32 x) { store(to + hidden + i, x); });
            if (spec_.entry->normed_residual)
                for (int i = 0; i < hidden; i += LANES) store(at + i, load(to + hidden + i));
        });
    }

    const E* embedding(const Step& step, int token) const {
        return static_cast<const E*>(spec_.embedding) + step.input_ids[token] * spec_.hidden;
    }

    const DecoderSpec& spec_;
    Buffer<E> joined_;         // [T, 2 hidden]
    Buffer<float> embedded_;   // [T, hidden]
    Buffer<E> states_;         // [T, numbers of the target's states]
};

}  // namespace conch
