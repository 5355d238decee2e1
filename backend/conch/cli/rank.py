"""``conch rank``: a rank of a mesh whose engine runs on another host."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping

from conch.api.cores import usable_cores
from conch.api.errors import ConfigError
from conch.api.model_reference import resolve_model_reference
from conch.cli.common import model_reference

_WAIT_S = 300.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0
_STEADY_AFTER_S = 60.0
_REFUSED = 2
_DESCRIPTION = """
Take a seat in the mesh of an engine that runs on another host, load this rank's share of the model, and
compute it until the engine ends. The engine's model.json says how many such ranks it awaits, and where:

  {"tensor_parallel_size": 4, "remote_ranks": 2, "master_addr": "10.0.0.1",
   "rank_token_file": "/etc/conch/token", "model": ...}

for an engine on 10.0.0.1. On the other host each rank is a command of its own; torchrun starts several:

  torchrun --nproc-per-node 2 --no-python -- conch rank --rdzv 10.0.0.1:29501 --token-file /etc/conch/token
"""
_EPILOG = """
variables, as torchrun sets them:
  RANK, WORLD_SIZE  which rank this is to be. Where WORLD_SIZE is the engine's remote_ranks, they are numbered
                    from 0; where it is the size of the mesh, as the mesh numbers them. Another is refused.
                    Without RANK or --rank: any rank that is missing.
  LOCAL_WORLD_SIZE  so many ranks divide this host's cores where num_threads is not set (default: 1)
  LOCAL_RANK, GROUP_RANK    name this process in the engine's messages
  MASTER_ADDR, MASTER_PORT  where the engine is, without --rdzv; not under torchrun, where they mean its own
  CONCH_RANK_TOKEN          the secret, without --token-file

exit status: 0 when the engine has ended as it was told to; 1 when it, this rank or the connection has failed,
or no engine came in time (torchrun --max-restarts then tries again); 2 where another try is of no use.
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "rank",
        help="compute a share of a model whose engine runs on another host",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--rdzv", metavar="HOST:PORT", help="master_addr and master_port of the engine")
    parser.add_argument("--rank", type=int, metavar="N", help="in the mesh's numbering (default: see RANK)")
    parser.add_argument(
        "--model", metavar="PATH", help="the checkpoint on this host (default: the engine's path)"
    )
    parser.add_argument("--token-file", metavar="FILE", help="the secret that the engine knows")
    parser.add_argument(
        "--wait",
        type=float,
        default=_WAIT_S,
        metavar="S",
        help="seconds to wait for the engine (default: %(default)g)",
    )
    parser.add_argument("--forever", action="store_true", help="join again whenever the engine has ended")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Keep a rank running in a process of its own, which ends with whatever it holds when it is cut off."""
    command = [sys.executable, "-m", "conch.engine.rank", *rank_arguments(options, os.environ)]
    pause_s = _FIRST_PAUSE_S
    while True:
        began_s = time.monotonic()
        status = subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode
        if not options.forever or status == _REFUSED:
            return 1 if status < 0 else status
        is_steady = status == 0 or time.monotonic() - began_s > _STEADY_AFTER_S
        pause_s = _FIRST_PAUSE_S if is_steady else min(2 * pause_s, _LONGEST_PAUSE_S)
        time.sleep(pause_s)


def rank_arguments(options: argparse.Namespace, environment: Mapping[str, str]) -> list[str]:
    """Return what the process is told.

    Raises
    ------
    ConfigError
        It cannot be known where the engine is, or a variable is not what it should be.
    """
    host, port = _engine(options.rdzv, environment)
    told = {
        "--host": host,
        "--port": port,
        "--rank": options.rank,
        "--wait": options.wait,
        "--threads": max(1, usable_cores() // (_number(environment, "LOCAL_WORLD_SIZE") or 1)),
        "--token-file": options.token_file,
    }
    if options.rank is None:
        told |= {"--rank": _number(environment, "RANK"), "--world-size": _number(environment, "WORLD_SIZE")}
    if options.model is not None:
        told["--model"] = resolve_model_reference(model_reference(options.model))
    return [f"{name}={value}" for name, value in told.items() if value is not None]


def _engine(rdzv: str | None, environment: Mapping[str, str]) -> tuple[str, int]:
    if rdzv is None:
        if "TORCHELASTIC_RUN_ID" in environment or "MASTER_ADDR" not in environment:
            raise ConfigError("--rdzv HOST:PORT is missing: master_addr and master_port of the engine")
        rdzv = f"{environment['MASTER_ADDR']}:{environment.get('MASTER_PORT', '')}"
    host, _, port = rdzv.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"expected HOST:PORT, got {rdzv!r}")
    return host.strip("[]"), int(port)


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name)
    if text is None:
        return None
    if not text.isdecimal():
        raise ConfigError(f"{name} must be a number, not {text!r}")
    return int(text)
