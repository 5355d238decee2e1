"""Tenants get what is theirs, by the bound of Sheng et al. (OSDI '24)."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conch_plugins.schedulers.accounts import Accounts
from conch_plugins.schedulers.fair import FairScheduler
from support.scheduling import check_answers, simulate

INPUT, OUTPUT = 1.0, 2.0


def fair(context, clock=None):
    return FairScheduler(context)


class Service:
    """What tenants were served, in weighted tokens, step by step, and who had requests waiting."""

    def __init__(self, simulation):
        self.simulation = simulation
        self.requests = []
        self.served = []
        self.waiting = []

    def add(self, tenant, prompt, outputs):
        number = len(self.requests)
        tokens = [number % 900, *[7] * (prompt - 1)]
        self.requests.append(self.simulation.add(tokens, max_tokens=outputs, tenant=tenant))

    def step(self):
        waiting = {request.tenant for request in self.simulation.waiting}
        self.simulation.step()
        total = dict.fromkeys(sorted({request.tenant for request in self.requests}), 0.0)
        for request in self.requests:
            if request.first_scheduled_s is not None:
                total[request.tenant] += INPUT * request.num_prompt
                total[request.tenant] += OUTPUT * (request.num_tokens - request.num_prompt)
        self.served.append(total)
        self.waiting.append(waiting & {request.tenant for request in self.simulation.waiting})

    def widest_gap(self, one, other):
        """Largest difference of what two tenants were served in any time in which both waited."""
        widest, low, high = 0.0, None, None
        for total, waiting in zip(self.served, self.waiting, strict=True):
            if not {one, other} <= waiting:
                low = high = None
                continue
            difference = total[one] - total[other]
            low = difference if low is None else min(low, difference)
            high = difference if high is None else max(high, difference)
            widest = max(widest, high - low)
        return widest


def bound(simulation):
    context = simulation.context
    pool = context.num_blocks * context.config.block_size
    return 2 * max(INPUT * min(pool, context.model.max_model_len), OUTPUT * pool)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    num_tenants=st.integers(2, 4),
    num_blocks=st.integers(8, 24),
    seats=st.integers(1, 6),
    num_drafts=st.sampled_from([0, 0, 3]),
)
def test_the_gap_keeps_to_the_bound_though_one_sends_ten_times_the_load(
    seed, num_tenants, num_blocks, seats, num_drafts
):
    draw = random.Random(seed)
    simulation = simulate(
        fair, num_blocks, num_drafts, max_num_seqs=seats, max_num_batched_tokens=draw.randint(seats, 30)
    )
    service = Service(simulation)
    for _ in range(120):
        for tenant in range(num_tenants):
            count = 10 if tenant == 0 else 1
            for _ in range(count):
                if draw.random() < 0.1:
                    service.add(f"tenant {tenant}", draw.randint(1, 15), draw.randint(1, 16))
        if simulation.waiting or simulation.running:
            service.step()
    both = [waiting for waiting in service.waiting if len(waiting) > 1]
    for one in range(num_tenants):
        for other in range(one):
            gap = service.widest_gap(f"tenant {one}", f"tenant {other}")
            assert gap <= bound(simulation), f"{gap} in {len(both)} steps with tenants waiting"
    simulation.run()
    check_answers(simulation)
    assert len(simulation.ended) == len(service.requests)


def test_two_tenants_get_the_same_though_one_sends_ten_times_the_load():
    simulation = simulate(fair, num_blocks=20, max_num_seqs=4, max_num_batched_tokens=24)
    service = Service(simulation)
    for _ in range(400):
        service.add("greedy", 9, 8)
        if len(service.served) % 10 == 0:
            service.add("modest", 9, 8)
        service.step()
    assert sum(len(waiting) == 2 for waiting in service.waiting) > 50, "they never competed"
    assert service.widest_gap("greedy", "modest") <= bound(simulation)
    left_behind = [request for request in simulation.waiting if request.tenant == "modest"]
    assert len(left_behind) <= 4


def test_a_tenant_too_far_ahead_gives_way():
    simulation = simulate(fair, num_blocks=40, max_num_seqs=4, max_num_batched_tokens=24)
    line = simulation.scheduler._line
    for number in range(3):
        simulation.add([number] * 5, max_tokens=40, tenant="ahead")
    simulation.step()
    simulation.add([9] * 145, max_tokens=10, tenant="behind")
    simulation.step()
    ahead, behind = simulation.running[0], simulation.waiting
    assert [request.tenant for request in behind] == ["behind"], "it fits: there is no room to fall behind"
    assert not line.too_far_ahead(simulation.running, 1000.0)
    next(account for account in line.accounts.busy if account.tenant == "ahead").served += 1000.0
    assert {request.tenant for request in line.too_far_ahead(simulation.running, 1000.0)} == {"ahead"}
    plan = simulation.step()
    assert ahead.id in plan.preempted and len(plan.preempted) == 3
    assert [row.request_id for row in plan.rows] == [behind[0].id]
    simulation.run()
    check_answers(simulation)


def test_fcfs_does_not_keep_to_it():
    from conch_plugins.schedulers.fcfs import FcfsScheduler

    simulation = simulate(lambda context, clock: FcfsScheduler(context), num_blocks=8, max_num_seqs=4)
    service = Service(simulation)
    for _ in range(100):
        service.add("greedy", 6, 8)
    for _ in range(20):
        service.add("modest", 6, 8)
    for _ in range(200):
        service.step()
    assert service.widest_gap("greedy", "modest") > bound(simulation)


@pytest.mark.parametrize("away", ["nobody else waits", "others wait"])
def test_time_away_earns_nothing(away):
    simulation = simulate(fair, num_blocks=40, max_num_seqs=2, max_num_batched_tokens=24)
    service = Service(simulation)
    service.add("late", 3, 1)
    simulation.run()
    for _ in range(40):
        service.add("busy", 6, 10)
    for _ in range(60 if away == "others wait" else 500):
        if simulation.waiting or simulation.running:
            service.step()
    for _ in range(40):
        service.add("late", 6, 10)
        service.add("busy", 6, 10)
    for _ in range(100):
        service.step()
    assert service.widest_gap("late", "busy") <= bound(simulation)


def test_accounts_do_not_pile_up():
    accounts = Accounts()
    simulation = simulate(fair)
    for number in range(1000):
        request = simulation.add([1, 2], max_tokens=1, tenant=f"tenant {number}")
        accounts.queue(request)
        account = accounts.start(request)
        account.served += 4
        accounts.unqueue(request)
        accounts.stop(account)
    assert len(accounts) < 10


def test_a_tenants_old_requests_are_not_held_back_by_its_short_ones():
    simulation = simulate(fair, num_blocks=40, max_num_seqs=1, max_num_batched_tokens=24)
    long = simulation.add([3] * 60, max_tokens=2, tenant="a")
    for step in range(60):
        simulation.add([step], max_tokens=3, tenant="a")
        simulation.step()
    assert long in simulation.ended
