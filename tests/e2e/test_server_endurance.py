"""What builds up over many requests: F04, F23 shortened, memory, and the cost of doing nothing."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from loadgen import processes
from loadgen.grpc_client import LoadClient, greedy
from loadgen.mixture import draws
from rich.console import Console
from rich.progress import Progress
from soak import drive

from support.lab import CONTEXT, Lab, cpu_s
from support.wire import ServedModel

pytestmark = pytest.mark.e2e

MIB = 1 << 20
SHM_SLACK_MB = 2.0
MEMORY_SLACK_MB = 8.0
"""What allocators keep for themselves after their first few hundred requests."""


def shm_mb(lab: Lab) -> float:
    return processes.shared_memory_mb(lab.server.process.pid)


def memory_mb(lab: Lab) -> dict[str, float]:
    return processes.memory_mb(lab.server.process.pid)


# F04: requests that are rejected give back what they were sent in.

REJECTIONS = (
    ({"text_input": "a", "parameters": {"temperature": "hot"}}, "temperature"),
    ({"text_input": "a", "parameters": {"top_p": 1.5}}, "top_p"),
    ({"text_input": "a " * 2 * CONTEXT}, str(CONTEXT)),
)
LARGE = ({"text_input": "a " * (MIB // 2)}, str(CONTEXT))


def test_rejected_requests_return_their_shared_memory(lab: Lab, tiny: ServedModel) -> None:
    asks = [(REJECTIONS[index // 2 % 3] if index % 2 else LARGE) for index in range(500)]

    def ask(index: int) -> str | None:
        (body, named), front_end = asks[index], (tiny.generate, tiny.stream, tiny.grpc)[index % 3]
        answer = front_end(body)
        return None if answer.error and named in answer.error and not answer.text else repr(answer)

    with lab.unharmed(tiny), ThreadPoolExecutor(4) as pool:
        # Triton's region grows to what is in flight at once, and does not shrink.
        assert not [*filter(None, pool.map(ask, range(24)))]
        before = shm_mb(lab)
        assert before > 0, "the region should be seen"
        assert not [*filter(None, pool.map(ask, range(500)))]
    assert shm_mb(lab) - before <= SHM_SLACK_MB


# Many short streams.


def stream_many(tiny: ServedModel, count: int, at_once: int = 20) -> None:
    async def run() -> list:
        room = asyncio.Semaphore(at_once)
        async with LoadClient(tiny.server.grpc, tiny.name) as client:

            async def one(index: int):
                async with room:
                    return await client.stream(greedy(f"stream {index} again", 4), timeout_s=60)

            return await asyncio.gather(*(one(index) for index in range(count)))

    for trace in asyncio.run(run()):
        assert (trace.num_tokens, trace.num_finals, trace.num_after_final, trace.error) == (4, 1, 0, None)


def test_a_thousand_streams_leave_nothing_behind(lab: Lab, tiny: ServedModel) -> None:
    with lab.unharmed(tiny):
        stream_many(tiny, 300)
        memory, shm = memory_mb(lab), shm_mb(lab)
        stream_many(tiny, 1000)
    grown = {role: size - memory[role] for role, size in memory_mb(lab).items()}
    assert {"stub", "engine", "server"} <= grown.keys()
    assert max(grown.values()) <= MEMORY_SLACK_MB, grown
    assert shm_mb(lab) - shm <= SHM_SLACK_MB


# F23. The whole soak is `make bench-soak`.

SOAK_S, CLIENTS = 24, 32


def test_a_mixture_of_requests_ends_as_it_should(lab: Lab, tiny: ServedModel) -> None:
    source = draws(23, CONTEXT)
    family = lab.server.family()

    def third() -> tuple[float, float]:
        """Return tokens per second, and per second of CPU."""
        cpu_before = cpu_s(family)
        quiet = Progress(console=Console(quiet=True))
        account = asyncio.run(drive(lab.server.grpc, tiny.name, source, CLIENTS, SOAK_S / 3, quiet))
        assert not account.violations
        assert (account.missing_finals, account.surplus_finals, account.after_final) == (0, 0, 0)
        assert {ended.split()[0] for ended in account.ended} == {
            "short",
            "invalid",
            "cancelled",
            "over_context",
            "empty",
        }
        tokens = sum(account.tokens_by_second.values())
        return tokens / SOAK_S * 3, tokens / (cpu_s(family) - cpu_before)

    with lab.unharmed(tiny):
        (_, first), _, (_, last) = third(), third(), third()
    # A second of CPU, and not of the clock: what else the machine does is not the server's fault.
    assert last >= 0.8 * first
    lab.assert_whole_pool(tiny)


def test_an_idle_server_is_idle(lab: Lab, tiny: ServedModel) -> None:
    lab.assert_drained(tiny)
    family = lab.server.family()
    names = {process.name() for process in family}
    assert {"tritonserver", "triton_python_backend_stub"} <= names and len(family) >= 4
    time.sleep(0.5)  # the last flush of the metrics
    before, began = cpu_s(family), time.monotonic()
    time.sleep(5)
    assert cpu_s(family) - before < 0.03 * (time.monotonic() - began)
