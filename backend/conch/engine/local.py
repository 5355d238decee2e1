"""The engine in this process, without Triton: for the command line, tests and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType

from conch.api.config import EngineConfig
from conch.api.errors import RequestError
from conch.api.sampling import SamplingParams
from conch.api.steps import FinishReason, RequestOutput, TokenLogprobs, Usage
from conch.engine.build import ProgressCallback, build_engine
from conch.engine.protocol import AddRequest, CancelRequest, EngineStats


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished choice."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason
    usage: Usage


class LocalEngine:
    """Drives an engine step by step; a context manager.

    Parameters
    ----------
    config
        The engine's configuration.
    progress
        Called with a stage and a fraction while the engine starts.
    """

    def __init__(self, config: EngineConfig, progress: ProgressCallback | None = None) -> None:
        built = build_engine(config, progress or (lambda stage, fraction: None))
        self._engine = built.engine
        self._next_id = 0
        self.info = built.info

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._engine.close()

    @property
    def has_work(self) -> bool:
        """Whether `step` would bring anything."""
        return self._engine.has_work

    def add(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        timeout_s: float | None = None,
        tenant: str | None = None,
    ) -> int:
        """Queue a request; returns the id that its outputs carry."""
        self._next_id += 1
        self._engine.add(
            AddRequest(
                request_id=self._next_id,
                token_ids=tuple(token_ids),
                params=params,
                priority=priority,
                cache_salt=cache_salt,
                timeout_s=timeout_s,
                tenant=tenant,
            )
        )
        return self._next_id

    def cancel(self, request_id: int, choices: Sequence[int] = ()) -> None:
        """End a request, or the named ones of its choices."""
        self._engine.cancel(CancelRequest(request_id, tuple(choices)))

    def step(self) -> list[RequestOutput]:
        """Take one step; returns its news."""
        return self._engine.step()

    def stats(self) -> EngineStats:
        """Return a snapshot of gauges and counters."""
        return self._engine.stats()

    def stream(self, token_ids: Sequence[int], params: SamplingParams) -> Iterator[RequestOutput]:
        """Serve one request alone, yielding its news. Raises RequestError if it fails."""
        request_id = self.add(token_ids, params)
        alive = params.n
        try:
            while alive:
                for output in self.step():
                    if output.request_id != request_id:
                        continue
                    if output.failure is not None:
                        raise RequestError(output.failure.message, output.failure.code)
                    alive -= output.finish_reason is not None
                    yield output
        finally:
            self.cancel(request_id)  # if the caller has stopped listening

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[list[Completion]]:
        """Serve all prompts at once; returns the choices of each. Raises RequestError if one fails."""
        ids = [self.add(prompt, wanted) for prompt, wanted in zip(prompts, params, strict=True)]
        news: dict[int, list[RequestOutput]] = {request_id: [] for request_id in ids}
        while self._engine.has_work:
            for output in self.step():
                if output.failure is not None:
                    raise RequestError(output.failure.message, output.failure.code)
                news.setdefault(output.request_id, []).append(output)
        return [
            [_complete(news[request_id], choice) for choice in range(wanted.n)]
            for request_id, wanted in zip(ids, params, strict=True)
        ]


def _complete(news: Sequence[RequestOutput], choice: int) -> Completion:
    mine = [output for output in news if output.choice == choice]
    last = mine[-1]
    assert last.finish_reason is not None and last.usage is not None, "the engine ran until all had ended"
    logprobs = [entry for output in mine for entry in output.logprobs or ()]
    return Completion(
        token_ids=tuple(token for output in mine for token in output.token_ids),
        logprobs=tuple(logprobs) if mine[0].logprobs is not None else None,
        finish_reason=last.finish_reason,
        usage=last.usage,
    )
