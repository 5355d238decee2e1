"""What every scheduler promises."""

from __future__ import annotations

import random
from typing import Any

import pytest

from conch.api import BuildContext, Scheduler
from conch.testing.context import VOCAB_SIZE, make_context
from conch.testing.simulation import Simulation, expected


class SchedulerContract:
    """Inherit, implement `build`, and let pytest collect the subclass."""

    def build(self, context: BuildContext) -> Scheduler:
        """Build the scheduler under test."""
        raise NotImplementedError

    def simulate(
        self,
        num_blocks: int = 64,
        num_drafts: int = 0,
        **settings: Any,  # noqa: ANN401 - each key has its own type
    ) -> Simulation:
        """Return a simulation of the scheduler under test; `settings` are keys of `EngineConfig`."""
        context = make_context(num_blocks=num_blocks, **settings)
        return Simulation(self.build(context), context, num_drafts)

    def test_is_a_scheduler(self) -> None:
        """It has the methods of the seam."""
        assert isinstance(self.build(make_context()), Scheduler)

    def test_plans_nothing_for_nobody(self) -> None:
        """Without requests there is no plan."""
        assert self.simulate().step() is None

    @pytest.mark.parametrize("seed", range(8))
    @pytest.mark.parametrize("caching", [True, False])
    def test_every_request_ends_with_its_own_tokens(self, seed: int, caching: bool) -> None:
        """Random arrivals, lengths, pools and budgets: all end right, within limits, and no block is lost."""
        draw = random.Random(seed)
        simulation = self.simulate(
            num_blocks=draw.randint(12, 30),
            num_drafts=draw.choice([0, 3]),
            max_num_seqs=draw.randint(2, 6),
            max_num_batched_tokens=draw.randint(6, 40),
            enable_prefix_caching=caching,
        )
        self._serve_at_random(simulation, draw)

    def test_prompts_stay_whole_without_chunked_prefill(self) -> None:
        """A prompt longer than the budget is computed in one step."""
        simulation = self.simulate(
            enable_chunked_prefill=False, max_num_batched_tokens=8, max_num_seqs=4, max_model_len=128
        )
        for length in (100, 3, 40, 70):
            simulation.add([length] * length, max_tokens=5)
        simulation.run()
        simulation.check_idle()
        assert len(simulation.ended) == 4

    def test_a_pool_that_one_request_fills(self) -> None:
        """Requests that each need the whole pool are served one after the other."""
        simulation = self.simulate(num_blocks=8)
        requests = [simulation.add([number] * 20, max_tokens=12) for number in (1, 2, 3)]
        simulation.run()
        simulation.check_idle()
        assert sorted(r.id for r in simulation.ended) == [r.id for r in requests]

    def test_a_prompt_that_is_cached_in_full(self) -> None:
        """At least one token is computed, whatever the cache holds."""
        for length in (3, 4, 5, 7, 8, 9, 16):
            simulation = self.simulate()
            for _ in range(3):
                simulation.add(range(length), max_tokens=4)
                simulation.run()
            assert [r.token_ids[length:] for r in simulation.ended] == [expected(range(length), 4)] * 3
            simulation.check_idle()

    def test_choices_reserve_their_seats(self) -> None:
        """A request of several choices is not admitted before all of them can run."""
        simulation = self.simulate(max_num_seqs=4)
        simulation.add([1, 2, 3], max_tokens=9)
        simulation.add([4, 5, 6, 7, 8], max_tokens=6, choices=4)
        simulation.add([9], max_tokens=3)
        simulation.run()
        simulation.check_idle()
        assert len(simulation.ended) == 6

    def test_those_who_leave_the_queue_are_not_served(self) -> None:
        """Requests that are cancelled while they wait, some of them in the step in which they came."""
        simulation = self.simulate(max_num_seqs=2, max_num_batched_tokens=8)
        requests = [simulation.add([number] * 9, max_tokens=4) for number in range(8)]
        simulation.step()
        for request in simulation.waiting[::2]:
            simulation.cancel(request)
        simulation.cancel(simulation.add([1], max_tokens=2))
        simulation.step()
        late = simulation.add([2], max_tokens=2)
        simulation.cancel(late)
        simulation.run()
        simulation.check_idle()
        assert late not in simulation.ended
        assert len(simulation.ended) < len(requests)

    def test_the_end_of_a_request_is_passed_on(self) -> None:
        """Workers hear of a request that was cancelled between two steps."""
        simulation = self.simulate()
        gone, stays = simulation.add([1, 2, 3], max_tokens=50), simulation.add([4, 5], max_tokens=5)
        simulation.step()
        simulation.cancel(gone)
        simulation.run()
        simulation.check_idle()
        told = [plan for plan in simulation.plans if gone.id in plan.finished]
        assert len(told) == 1
        assert [request.id for request in simulation.ended] == [stays.id]

    def _serve_at_random(self, simulation: Simulation, draw: random.Random) -> None:
        pool_tokens = simulation.context.num_blocks * simulation.context.config.block_size
        prefix = [draw.randrange(VOCAB_SIZE) for _ in range(12)]
        cancelled, count = 0, 15
        for _ in range(count):
            own = [draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(1, 12))]
            prompt = prefix[: draw.choice([0, 8, 12])] + own
            simulation.add(
                prompt,
                max_tokens=draw.randint(1, min(20, pool_tokens - len(prompt))),
                choices=draw.choice([1, 1, 2]),
                salt=draw.choice(["", "", "salt"]),
                priority=draw.randint(0, 3),
                tenant=draw.choice(["", "red", "blue"]),
                ttft_target_s=draw.choice([None, 0.5, 8.0]),
                tpot_target_s=draw.choice([None, 0.01, 2.0]),
            )
            for _ in range(draw.randint(0, 4)):
                simulation.step()
            if simulation.running and draw.random() < 0.1:
                cancelled += 1
                simulation.cancel(draw.choice(simulation.running))
        simulation.run()
        simulation.check_idle()
        assert len(simulation.ended) >= count - cancelled
        for request in simulation.ended:
            prompt, output = request.token_ids[: request.num_prompt], request.token_ids[request.num_prompt :]
            assert output == expected(prompt, len(output), request.seed, request.cache_salt)
            assert request.num_tokens == request.limit
