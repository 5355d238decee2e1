"""Two hosts on this machine: network namespaces, joined by a cable that can be cut."""

from __future__ import annotations

import os
import subprocess

import pytest


class TwoHosts:
    """A context manager. Skips the test where the kernel or a missing right refuses namespaces."""

    addresses = ("10.211.0.1", "10.211.0.2")

    def __init__(self) -> None:
        self._names = [f"conch-{os.getpid()}-{index}" for index in range(2)]

    def __enter__(self) -> TwoHosts:
        made = []
        try:
            for name in self._names:
                _ip("netns", "add", name)
                made.append(name)
        except (OSError, subprocess.CalledProcessError) as error:
            for name in made:
                _ip("netns", "delete", name)
            pytest.skip(f"no network namespaces: {getattr(error, 'stderr', None) or error}")
        first, second = self._names
        _ip("-n", first, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", second)
        for name, address in zip(self._names, self.addresses, strict=True):
            _ip("-n", name, "address", "add", f"{address}/30", "dev", "cable")
            for device in ("lo", "cable"):
                _ip("-n", name, "link", "set", device, "up")
        return self

    def __exit__(self, *raised: object) -> None:
        for name in self._names:
            _ip("netns", "delete", name)

    def within(self, host: int) -> tuple[str, ...]:
        """Return the command that runs the one after it on a host."""
        return "ip", "netns", "exec", self._names[host]

    def cut(self) -> None:
        _ip("-n", self._names[1], "link", "set", "cable", "down")

    def mend(self) -> None:
        _ip("-n", self._names[1], "link", "set", "cable", "up")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
