"""The promises of `Scheduler.plan`, checked on one plan."""

from __future__ import annotations

from conch.api import BuildContext, KVManager, Request, Requests, Row, StepPlan

Snapshot = list[tuple[object, ...]]


def snapshot(requests: Requests) -> Snapshot:
    """Return all that a scheduler could have changed by mistake."""
    return [
        (r.id, tuple(r.token_ids), r.num_computed, r.drafts, r.pending_forks, r.is_known, r.num_preemptions)
        for r in (*requests.running, *requests.waiting)
    ] + [tuple(requests.finished)]


def check_plan(plan: StepPlan | None, requests: Requests, context: BuildContext) -> None:
    """Raise AssertionError where a plan, made for these requests with none in flight, breaks a promise."""
    running = {request.id: request for request in requests.running}
    waiting = {request.id: request for request in requests.waiting}
    if plan is None:
        owed = [request.id for request in (*running.values(), *waiting.values()) if request.owed > 0]
        assert not owed, f"no plan, though requests {owed} are owed tokens"
        return
    assert plan.finished == tuple(requests.finished), "the workers are not told who finished"
    assert len(set(plan.preempted)) == len(plan.preempted) and set(plan.preempted) <= running.keys()
    assert plan.kept.keys() <= set(plan.preempted), "KV is kept of a request that was not preempted"
    for request_id in plan.preempted:
        assert plan.kept.get(request_id, 0) in (0, running[request_id].num_computed), "KV is kept in part"
        assert not context.kv_manager.blocks(request_id), f"preempted request {request_id} holds blocks"
        del running[request_id]
    admitted = {admission.request_id: admission for admission in plan.admitted}
    runs = {**running, **{i: waiting[i] for i in admitted if i in waiting}}
    assert len(admitted) == len(plan.admitted) and admitted.keys() <= runs.keys()
    _check_limits(plan, runs, context)
    for row in plan.rows:
        request = runs[row.request_id]
        start = max(request.num_computed, plan.cached.get(row.request_id, 0))
        assert row.start == start, f"row of request {request.id} starts at {row.start}, not {start}"
        assert (row.request_id in admitted) == (not request.is_known), (
            "workers get what they do not know, once"
        )
        _check_row(row, request, context.kv_manager)
    for request_id, admission in admitted.items():
        request = runs[request_id]
        assert admission.token_ids == tuple(request.token_ids) and admission.limit == request.limit
        assert admission.num_prompt == request.num_prompt and admission.seed == request.seed
    if plan.rows or not waiting:
        return
    assert plan.preempted, "a plan without rows says nothing"


def _check_limits(plan: StepPlan, runs: dict[int, Request], context: BuildContext) -> None:
    config = context.config
    ids = [row.request_id for row in plan.rows]
    assert len(set(ids)) == len(ids), "a request has two rows"
    assert set(ids) <= runs.keys(), "a row is of a request that does not run"
    seats = sum(request.seats for request in runs.values())
    assert seats <= config.max_num_seqs, f"{seats} seats of {config.max_num_seqs} are taken"
    if config.enable_chunked_prefill:
        assert plan.num_tokens <= config.max_num_batched_tokens, "the token budget is exceeded"
    else:
        assert all(row.samples for row in plan.rows), "a prompt is split though chunked prefill is off"


def _check_row(row: Row, request: Request, manager: KVManager) -> None:
    paid, owed = row.count - len(row.drafts), request.num_tokens - row.start
    assert 1 <= paid <= owed, f"request {request.id} is owed {owed} tokens and paid {paid}"
    assert row.samples == (paid == owed), "a row samples when it reaches the last known token"
    assert row.drafts == request.drafts[: len(row.drafts)] and (row.samples or not row.drafts)
    assert request.num_tokens + len(row.drafts) < max(request.limit, request.num_tokens + 1), (
        "drafts past the limit"
    )
    held = len(manager.blocks(request.id)) * manager.block_size
    assert held >= row.start + row.count, f"request {request.id} writes outside its blocks"
