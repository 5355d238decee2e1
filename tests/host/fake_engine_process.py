"""An engine process without a model: it answers a prompt by repeating it, one token a step.

What a request's `cache_salt` says is done to it: ``die`` kills the process, ``fail`` fails the request,
``break`` breaks the engine with a message, ``garbage`` sends bytes that are no message, ``silent`` never
answers. The `seed` of the configuration that is `REFUSES` makes it fail to start, `DIES` makes it die.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from tokenizers import Tokenizer

from conch.api.errors import ErrorCode
from conch.api.steps import Failure, FinishReason, RequestOutput, TokenLogprobs, Usage
from conch.engine.protocol import (
    AddRequest,
    CancelRequest,
    EngineEnd,
    EngineFailed,
    EngineReady,
    EngineStats,
    Progress,
    StepNews,
    StopEngine,
)

REFUSES, DIES = 13, 14
CONTEXT, VOCABULARY, SEATS = 256, 420, 8
STEP_S = 0.002
EOS_ID = 2


@dataclass
class Served:
    message: AddRequest
    choices: set[int] = field(default_factory=set)
    produced: int = 0
    arrival_s: float = field(default_factory=time.monotonic)

    def usage(self) -> Usage:
        passed = time.monotonic() - self.arrival_s
        return Usage(len(self.message.token_ids), self.produced, 0, 0, 0.0, min(0.001, passed), passed)


class FakeEngine:
    def __init__(self, end: EngineEnd, connection: Connection) -> None:
        self._end, self._connection = end, connection
        self._live: dict[int, Served] = {}
        self._outbox: list[RequestOutput] = []
        self._prompt_tokens = self._generated = 0

    def run(self) -> None:
        start = self._end.receive()
        self._end.send(Progress("loading weights", 0.5))
        if start.config.seed == REFUSES:
            self._end.send(EngineFailed("the weights are of cheese"))
            raise SystemExit(1)
        flag = Path(start.config.model, "refuse")
        if start.config.seed == DIES or flag.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        assert Tokenizer.from_file(f"{start.config.model}/tokenizer.json").get_vocab_size() <= VOCABULARY
        self._end.send(
            EngineReady(
                model="fake",
                model_folder=start.config.model,
                vocab_size=VOCABULARY,
                max_model_len=CONTEXT,
                max_tokens_per_request=CONTEXT,
                max_num_seqs=SEATS,
                num_blocks=16,
                block_size=16,
                eos_token_ids=(EOS_ID,),
            )
        )
        while True:
            while self._end.has_message(STEP_S if self._busy else None):
                message = self._end.receive()
                if isinstance(message, StopEngine):
                    return
                self._handle(message)
            self._step()

    @property
    def _busy(self) -> bool:
        answering = any(served.message.cache_salt != "silent" for served in self._live.values())
        return answering or bool(self._outbox)

    def _handle(self, message) -> None:
        if isinstance(message, CancelRequest):
            served = self._live.get(message.request_id)
            for choice in sorted(served.choices) if served else ():
                if not message.choices or choice in message.choices:
                    self._end_choice(served, choice, FinishReason.CANCELLED, ())
            return
        assert isinstance(message, AddRequest)
        match message.cache_salt:
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "break":
                self._end.send(EngineFailed("a screw is loose"))
                raise SystemExit(1)
            case "garbage":
                self._connection.send_bytes(b"\xc1")
            case "fail":
                failure = Failure(ErrorCode.TIMEOUT, "the request timed out")
                self._outbox.append(RequestOutput(message.request_id, 0, failure=failure))
            case _:
                self._prompt_tokens += len(message.token_ids)
                self._live[message.request_id] = Served(message, set(range(message.params.n)))

    def _step(self) -> None:
        for served in list(self._live.values()):
            if served.message.cache_salt == "silent":
                continue
            prompt, params = served.message.token_ids, served.message.params
            token = prompt[served.produced % len(prompt)]
            served.produced += 1
            stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS_ID})
            reason = FinishReason.LENGTH if served.produced >= params.max_tokens else None
            reason = FinishReason.STOP if token in stops and served.produced >= params.min_tokens else reason
            for choice in sorted(served.choices):
                self._generated += 1
                logprobs = None
                if params.logprobs is not None:
                    top = tuple((token + i, -0.5 - i) for i in range(params.logprobs))
                    logprobs = (TokenLogprobs(token, -0.5, 1, top),)
                self._end_choice(served, choice, reason, (token,), logprobs)
        stats = EngineStats(
            running=len(self._live),
            kv_blocks_used=len(self._live),
            kv_blocks_total=16,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generated,
        )
        news, self._outbox = tuple(self._outbox), []
        self._end.send(StepNews(news, stats))

    def _end_choice(self, served, choice, reason, tokens, logprobs=None) -> None:
        request_id = served.message.request_id
        usage = served.usage() if reason else None
        self._outbox.append(RequestOutput(request_id, choice, tokens, logprobs, reason, usage))
        if reason:
            served.choices.discard(choice)
            if not served.choices:
                self._live.pop(request_id, None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    connection = Connection(parser.parse_args().fd)
    with contextlib.suppress(EOFError, OSError):
        FakeEngine(EngineEnd(connection), connection).run()
