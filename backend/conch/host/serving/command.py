"""What tritonserver is called with: arguments, environment and ports."""

from __future__ import annotations

import difflib
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from conch.host.serving.errors import ServeError
from conch.host.serving.folders import backend_directory
from conch.host.serving.install import TritonInstall
from conch.host.settings import SETTINGS_VARIABLE, SUPERVISED_VARIABLE

EXIT_TIMEOUT_S = 10
LAST_WORDS_S = 3
"""What tritonserver gets on top of the exit timeout, for ending the requests that did not finish in it."""

_DEFAULT_PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002}


@dataclass(frozen=True)
class ServerFlags:
    """Flags of tritonserver by their own names, without the dashes; each may be given several times.

    A flag that is given without a value has the value None.
    """

    values: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> ServerFlags:
        """Read ``--flag=value``, ``--flag value`` and, before another flag or the end, ``--flag``.

        Raises
        ------
        ServeError
            Something that is not a flag.
        """
        values: dict[str, tuple[str | None, ...]] = {}
        rest = list(arguments)
        while rest:
            word = rest.pop(0)
            if not word.startswith("--"):
                raise ServeError(f"unexpected argument {word!r}")
            name, separator, text = word[2:].partition("=")
            value: str | None = text if separator else None
            if not separator and rest and not rest[0].startswith("--"):
                value = rest.pop(0)
            values[name] = (*values.get(name, ()), value)
        return cls(values)

    def last(self, name: str) -> str | None:
        """Return the last value given for a flag; None where it was not given, or without a value."""
        return self.values.get(name, (None,))[-1]

    def is_on(self, name: str, default: bool) -> bool:
        """Return a boolean flag in tritonserver's spellings."""
        if name not in self.values:
            return default
        return (self.last(name) or "true").lower() in ("true", "1", "on")

    def number(self, name: str, default: int) -> int:
        """Return an integer flag."""
        text = self.last(name)
        try:
            return default if text is None else int(text)
        except ValueError as error:
            raise ServeError(f"--{name} must be an integer, not {text!r}") from error

    def refuse_unknown(self, known: frozenset[str] | None) -> None:
        """Raise ServeError for a flag that is not known, suggesting the nearest; None knows all."""
        for name in self.values:
            if known is not None and name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean --{near[0]}?" if near else ""
                raise ServeError(
                    f"--{name} is neither an option of `conch serve` nor a flag of tritonserver's{hint}"
                )

    def arguments(self) -> list[str]:
        """Return the flags as one argument each."""
        return [
            f"--{name}" if value is None else f"--{name}={value}"
            for name, given in self.values.items()
            for value in given
        ]


@dataclass(frozen=True)
class Endpoints:
    """Addresses that the server listens on; a port is None where the protocol is switched off."""

    address: Mapping[str, str]
    port: Mapping[str, int | None]

    @classmethod
    def from_flags(cls, flags: ServerFlags) -> Endpoints:
        """Read addresses and ports."""
        address, port = {}, {}
        for name, default in _DEFAULT_PORTS.items():
            host = "http" if name == "metrics" and "metrics-address" not in flags.values else name
            address[name] = flags.last(f"{host}-address") or "0.0.0.0"
            port[name] = flags.number(f"{name}-port", default) if flags.is_on(f"allow-{name}", True) else None
        return cls(address, port)

    def reachable(self, name: str) -> str:
        """Return ``host:port`` as a client on this machine would write it."""
        address = self.address[name]
        return f"{'localhost' if address in ('0.0.0.0', '::') else address}:{self.port[name]}"

    def refuse_taken_ports(self) -> None:
        """Raise ServeError where a port cannot be bound, naming its flag."""
        for name, port in self.port.items():
            if port is None:
                continue
            family = socket.AF_INET6 if ":" in self.address[name] else socket.AF_INET
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((self.address[name], port))
                except (OSError, OverflowError) as error:
                    raise ServeError(
                        f"cannot listen on {self.address[name]}:{port} ({error}); "
                        f"choose another port with --{name}-port"
                    ) from error


@dataclass(frozen=True)
class ServerCommand:
    """Everything that one start of tritonserver needs, decided once.

    Attributes
    ----------
    arguments
        Executable and arguments, without the shared-memory prefix, which differs from start to start.
    exit_timeout_s
        Seconds that requests in flight are given when the server stops; then they end with an error.
    tolerates_failed_models
        Whether to go on serving when a model does not load.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    endpoints: Endpoints
    exit_timeout_s: int
    tolerates_failed_models: bool
    origin: str


def build_command(
    install: TritonInstall, repositories: Sequence[Path], flags: ServerFlags, overrides: Mapping[str, Any]
) -> ServerCommand:
    """Put a command together.

    Raises
    ------
    ServeError
        A flag that this tritonserver does not know, or a value that cannot be.
    """
    flags.refuse_unknown(install.flags)
    exit_timeout_s = flags.number("exit-timeout-secs", EXIT_TIMEOUT_S)
    ours = {
        "model-repository": tuple(str(path.resolve()) for path in repositories),
        "backend-directory": (str(backend_directory(install)),),
        "exit-timeout-secs": (str(exit_timeout_s + LAST_WORDS_S),),
        # The server stays up when a model fails, so that we can ask it for the reason; then we stop it.
        "exit-on-error": ("false",),
    }
    merged = ServerFlags({**flags.values, **ours})
    return ServerCommand(
        arguments=(str(install.server), *merged.arguments()),
        environment=server_environment(install, overrides),
        endpoints=Endpoints.from_flags(flags),
        exit_timeout_s=exit_timeout_s,
        tolerates_failed_models=not flags.is_on("exit-on-error", True),
        origin=install.origin,
    )


def server_environment(install: TritonInstall, overrides: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment that tritonserver and its stubs run in."""
    environment = dict(os.environ)
    libraries = [*map(str, install.libraries), environment.get("LD_LIBRARY_PATH", "")]
    environment["LD_LIBRARY_PATH"] = ":".join(filter(None, libraries))
    # The interpreter in the stub finds its prefix, and so its packages, through the first python3 on PATH.
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment.get('PATH', os.defpath)}"
    environment["LC_ALL"] = "C.UTF-8"
    environment[SUPERVISED_VARIABLE] = "1"
    if overrides:
        environment[SETTINGS_VARIABLE] = msgspec.json.encode(dict(overrides)).decode()
    return environment
