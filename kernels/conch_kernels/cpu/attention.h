// Paged attention: every query against its own row's past, in tiles.
#pragma once

#include "attention_tile.h"
#include "team.h"

namespace conch {

// What is done with KV, whatever it is kept as.
template <class E>
class KvCache {
   public:
    virtual ~KvCache() = default;

    // Write one token's keys, which are rotated already, and values, [heads][size], to its slot; see `write_kv`.
    virtual void write(const KvLayout& layout, const Pool& pool, int64_t slot, const float* keys,
                       const float* values) const = 0;

    // out [tokens][heads][value size] = attention of all queries of the plan. The keys and values of this step's
    // tokens are in the pool already. To be called by all members of the team that the plan is for, each with a scratch
    // of its own; returns when all is done.
    virtual void attend(Crew all, const AttentionPlan& plan, const AttentionConstants& constants, const Pool& pool,
                        Heads<E> query, E* out, AttentionScratch& scratch) const = 0;
};

// For pools of this layout.
template <class E>
const KvCache<E>& kv_cache(const KvLayout& layout);

}  // namespace conch
