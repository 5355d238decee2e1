"""`make bench-soak`: many clients, a mixture of requests, a long time; nothing may be lost or left behind.

Fails (exit status 1) unless every request that was not abandoned got exactly one final response and nothing
after it, throughput at the end is at least 80 % of that at the start, the server is empty and answers as
before, no process was replaced, and neither memory nor shared memory grew.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadgen import machine, processes, prometheus, report
from loadgen.grpc_client import LoadClient, greedy
from loadgen.mixture import Account, Drawn, draws
from loadgen.served import ServedModel
from rich.console import Console
from rich.progress import Progress

DRAIN_S = 5.0
IDLE_WINDOW_S = 10.0
MAX_VIOLATIONS = 20
LIMITS = {
    "throughput_last_over_first": 0.8,
    "memory_growth_mb": 16.0,
    "shm_growth_mb": 2.0,
    "idle_cores": 0.03,
}
MEANING = {
    "soak_requests": "requests sent",
    "soak_missing_finals": "without a final response",
    "soak_surplus_finals": "final responses too many, and responses after the final one",
    "soak_throughput_last_over_first": "tokens/s of the last window over the first",
    "soak_memory_growth_mb": "largest growth of server, stub or engine, MiB without shared pages",
    "soak_shm_growth_mb": "growth of /dev/shm, MiB",
    "soak_idle_cores": "cores kept busy by the idle server afterwards",
    "soak_passed": "all checks hold",
}
CANARY = greedy("1, 2, 3, 4,", 8)


@dataclass(frozen=True)
class State:
    """What the idle server holds."""

    memory_mb: dict[str, float]
    shm_mb: float
    pids: dict[str, list[int]]
    kv_blocks_used: float
    canary: str
    idle_cores: float


async def drive(
    url: str, model: str, source: Iterator[Drawn], clients: int, seconds: float, progress: Progress
) -> Account:
    """Keep `clients` requests in flight for `seconds`, then let those in flight end."""
    account = Account(began_s=time.perf_counter())
    task = progress.add_task(f"{clients} clients", total=seconds)

    async def client_loop(client: LoadClient) -> None:
        while (now_s := time.perf_counter() - account.began_s) < seconds:
            drawn = next(source)
            trace = await client.stream(drawn.request, leave_when=leaving(drawn.leave_after), timeout_s=120)
            account.add(drawn, trace)
            progress.update(task, completed=now_s)

    async with LoadClient(url, model) as client:
        await asyncio.gather(*(client_loop(client) for _ in range(clients)))
    progress.update(task, completed=seconds)
    return account


def leaving(after: int | None) -> Any:  # noqa: ANN401 - a predicate over the tokens so far
    """Return when a client leaves."""
    return lambda num_tokens: after is not None and num_tokens >= after


def wait_until_drained(server: ServedModel) -> float | None:
    """Return the seconds until nothing runs or waits, or None if that takes longer than `DRAIN_S`."""
    began = time.monotonic()
    while time.monotonic() - began < DRAIN_S:
        metrics = prometheus.fetch(server.metrics_url)
        if not any(prometheus.read(metrics, name) for name in (prometheus.RUNNING, prometheus.WAITING)):
            return time.monotonic() - began
        time.sleep(0.1)
    return None


async def ask_canary(url: str, model: str) -> str:
    """Return the greedy answer to a fixed prompt."""
    async with LoadClient(url, model) as client:
        trace = await client.stream(CANARY, timeout_s=30)
    return trace.text or f"error: {trace.error}"


def observe(server: ServedModel, model: str) -> State:
    """Look at an idle server."""
    canary = asyncio.run(ask_canary(server.grpc_url, model))
    wait_until_drained(server)
    time.sleep(1)
    idle = processes.cpu_cores(server.pid, IDLE_WINDOW_S)
    return State(
        memory_mb=processes.memory_mb(server.pid),
        shm_mb=processes.shared_memory_mb(server.pid),
        pids=processes.pids_by_role(server.pid),
        kv_blocks_used=prometheus.read(prometheus.fetch(server.metrics_url), prometheus.KV_BLOCKS_USED),
        canary=canary,
        idle_cores=round(idle, 4),
    )


def figures(
    account: Account, before: State, after: State, seconds: float, drained_s: float | None
) -> dict[str, Any]:
    """Turn what was seen into figures and checks."""
    window = max(1, min(60, int(seconds / 3)))
    end = int(seconds)
    first, last = account.tokens_per_s(0, window), account.tokens_per_s(end - window, end)
    growth = {role: after.memory_mb.get(role, 0.0) - size for role, size in before.memory_mb.items()}
    steady = last / first if first else 0.0
    checks = {
        "every request got one final response": not account.missing_finals,
        "nothing came twice or late": not account.surplus_finals and not account.after_final,
        "every request ended as it should": not account.violations,
        "throughput held": steady >= LIMITS["throughput_last_over_first"],
        "drained": drained_s is not None and after.kv_blocks_used == before.kv_blocks_used,
        "no process was replaced": after.pids == before.pids,
        "the canary still sings": after.canary == before.canary,
        "memory did not grow": max(growth.values()) <= LIMITS["memory_growth_mb"],
        "shared memory did not grow": after.shm_mb - before.shm_mb <= LIMITS["shm_growth_mb"],
        "idle": after.idle_cores < LIMITS["idle_cores"],
    }
    headline = {
        "soak_requests": sum(account.ended.values()),
        "soak_missing_finals": account.missing_finals,
        "soak_surplus_finals": account.surplus_finals + account.after_final,
        "soak_throughput_last_over_first": round(steady, 3),
        "soak_memory_growth_mb": round(max(growth.values()), 2),
        "soak_shm_growth_mb": round(after.shm_mb - before.shm_mb, 2),
        "soak_idle_cores": after.idle_cores,
        "soak_passed": all(checks.values()),
    }
    return {
        "headline": headline,
        "checks": checks,
        "limits": LIMITS,
        "window_s": window,
        "tokens_per_s": {"first": round(first, 1), "last": round(last, 1)},
        "ended": dict(sorted(account.ended.items())),
        "violations": dict(account.violations.most_common(MAX_VIOLATIONS)),
        "drained_s": drained_s,
        "before": vars(before),
        "after": vars(after),
        "tokens_by_second": [account.tokens_by_second[second] for second in range(end)],
    }


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="length of the soak (default 600)")
    parser.add_argument("--clients", type=int, default=32, help="requests in flight (default 32)")
    parser.add_argument("--seed", type=int, default=0, help="of the mixture")
    parser.add_argument("--context-tokens", type=int, default=8192, help="what the model was trained for")
    parser.add_argument("--model-name", default="smollm2", help="what the server calls the model")
    parser.add_argument("--serve-command", help="what starts the server; the default is `conch serve`")
    parser.add_argument("--output", type=Path, help="folder for the result instead of results/soak")
    return parser.parse_args()


def soak(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Warm up, look, soak, look again."""
    command = arguments.serve_command or f"{Path(sys.executable).parent / 'conch'} serve"
    source = draws(arguments.seed, arguments.context_tokens)
    with ServedModel(shlex.split(command)) as server, Progress(console=console) as progress:

        def run(seconds: float) -> Account:
            url, model = server.grpc_url, arguments.model_name
            return asyncio.run(drive(url, model, source, arguments.clients, seconds, progress))

        run(min(60.0, arguments.seconds / 3))
        wait_until_drained(server)
        before = observe(server, arguments.model_name)
        account = run(arguments.seconds)
        drained_s = wait_until_drained(server)
        after = observe(server, arguments.model_name)
    return figures(account, before, after, arguments.seconds, drained_s)


def main() -> int:
    """Run, write, print."""
    processes.unwind_on_sigterm()
    arguments = parse_arguments()
    output, errors = report.consoles()
    environment = machine.describe()
    result = soak(arguments, errors)
    path = report.write("soak", {**result, **environment, "clients": arguments.clients}, arguments.output)
    output.print(report.headline_table("Soak", result["headline"], MEANING))
    for violation, count in result["violations"].items():
        output.print(f"{count} x {violation}", markup=False)
    for check, holds in result["checks"].items():
        output.print(f"[{'green' if holds else 'red'}]{'ok    ' if holds else 'FAILED'}[/] {check}")
    output.print(f"written to {path}", markup=False, soft_wrap=True)
    report.print_last_line(output, result["headline"])
    return 0 if result["headline"]["soak_passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
