// Paged attention: every query against its own row's past, in tiles.
#pragma once

#include "attention_tile.h"
#include "team.h"

namespace conch {

// out [tokens][heads][value size] = attention of all queries of the plan. The keys and values of this step's tokens
// are in the pool already. To be called by all members of the team, each with a scratch of its own; contains one
// `team.each`, and returns when all is done.
template <class E>
void attend(Team& team, const AttentionPlan& plan, const AttentionConstants& constants, const E* pool_keys,
            const E* pool_values, Heads<E> query, E* out, AttentionScratch& scratch) {
    const std::vector<Task>& tasks = plan.tasks();
    const int count = int(tasks.size());
    scratch.fit(plan);
    team.each(count, [&](int item) {
        const Task& next = tasks[std::min(item + team.size(), count - 1)];
        Tile<E>(plan, tasks[item], constants, pool_keys, pool_values, scratch).go(query, next, out);
    });
}

}  // namespace conch
