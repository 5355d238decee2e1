// Paged attention: every query against its own row's past, in tiles.
#pragma once

#include "attention_plan.h"
#include "team.h"

namespace conch {

// How scores are made of queries and keys.
struct AttentionConstants {
    float scale;
    float softcap;       // scores become softcap * tanh(score / softcap); 0 for none
    const float* sinks;  // [heads]: one more score for each head, that takes no value; or null
};

// Queries, keys or values of a step, [tokens][heads][size] with any strides between tokens and heads.
template <class E>
struct Heads {
    const E* data;
    ptrdiff_t token_stride;
    ptrdiff_t head_stride;

    const E* at(int64_t token, int head) const { return data + token * token_stride + head * head_stride; }
};

// Memory that a member of the team keeps for its tiles. Each member has its own, and grows it itself.
class AttentionScratch;

// out [tokens][heads][value size] = attention of all queries of the plan. The keys and values of this step's tokens
// are in the pool already. To be called by all members of the team, each with a scratch of its own; contains one
// `team.each`, and returns when all is done.
template <class E>
void attend(Team& team, const AttentionPlan& plan, const AttentionConstants& constants, const E* pool_keys,
            const E* pool_values, Heads<E> query, E* out, AttentionScratch& scratch);

}  // namespace conch
