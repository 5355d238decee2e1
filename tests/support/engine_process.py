"""The engine as a process, driven from its host's end."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection

import psutil

from conch.api import EngineConfig, SamplingParams
from conch.engine.protocol import AddRequest, HostEnd, Progress, StartEngine


class EngineProcess:
    """An engine process and the host's end of its socket.

    `within` is a command that runs the one after it, in a network namespace for example.
    """

    def __init__(self, config: EngineConfig, within: Sequence[str] = ()) -> None:
        ours, theirs = socket.socketpair()
        command = [*within, sys.executable, "-m", "conch.engine", "--fd", str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        self.end = HostEnd(Connection(ours.detach()))
        self.end.send(StartEngine(config))
        self.first = self.receive(Progress)

    def receive(self, *skipped):
        while isinstance(message := self.end.receive(), skipped):
            pass
        return message

    def begin(self, prompt: Sequence[int], budget: int, request_id: int = 0) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=budget, ignore_eos=True)
        self.end.send(AddRequest(request_id=request_id, token_ids=tuple(prompt), params=params))

    def answers(self, prompts: Sequence[Sequence[int]], budget: int) -> list[list[int]]:
        """Serve all prompts at once, greedily."""
        for index, prompt in enumerate(prompts):
            self.begin(prompt, budget, index)
        answers: list[list[int]] = [[] for _ in prompts]
        alive = len(prompts)
        while alive:
            for output in self.receive(Progress).outputs:
                assert output.failure is None, output.failure
                answers[output.request_id] += output.token_ids
                alive -= output.finish_reason is not None
        return answers

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def ranks_of(pid: int) -> list[psutil.Process]:
    """Return the ranks that a process has started on this machine."""
    children = psutil.Process(pid).children()
    return [child for child in children if "conch.engine.rank" in " ".join(child.cmdline())]
