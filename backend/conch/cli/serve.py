"""``conch serve``: tritonserver with the conch backend, looked after until told to stop."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from conch.api.errors import ConfigError
from conch.cli.common import add_model_options, default_name, model_reference, settings_from
from conch.host.serving.command import Endpoints, ServerFlags, build_command
from conch.host.serving.folders import model_repository
from conch.host.serving.health import ModelState
from conch.host.serving.install import find_triton
from conch.host.serving.repository import ModelEntry, find_configs
from conch.host.supervisor import Supervisor

_EPILOG = """\
Every flag of tritonserver is taken by its own name, for instance:
  --http-port N, --grpc-port N, --metrics-port N   where to listen (8000, 8001, 8002)
  --http-address HOST, --grpc-address HOST         (0.0.0.0)
  --exit-timeout-secs N                            time for requests in flight when stopping (10)
  --model-control-mode none|poll|explicit          (none)
  --log-verbose N                                  (0)
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "serve",
        help="start Triton with the conch backend",
        description="Start Triton with the conch backend. Without --model and --repository it serves a small "
        "demo model under the name smollm2.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_model_options(parser)
    parser.add_argument(
        "--model-name", metavar="NAME", help="what clients call the model (default: its file's name)"
    )
    parser.add_argument(
        "--instances", type=int, metavar="N", help="engines that serve the model (default: 1)"
    )
    parser.add_argument(
        "--repository",
        "--model-repository",
        dest="repositories",
        action="append",
        type=Path,
        metavar="DIR",
        help="serve the models of a Triton model repository; may be repeated",
    )
    parser.add_argument("--triton-server", type=Path, metavar="PATH", help="the tritonserver to use")
    parser.set_defaults(run=run, takes_server_flags=True)


def run(options: argparse.Namespace) -> int:
    """Serve until told to stop."""
    overrides = settings_from(options)
    flags = ServerFlags.parse(options.server_flags)
    repositories = _repositories(options)
    # Read here what the server will read, so that a typing error costs a second and not a start.
    for name, config in find_configs(repositories, overrides):
        print(f"conch: model {name} is {config.model}", file=sys.stderr)
    install = find_triton(options.triton_server)
    command = build_command(install, repositories, flags, overrides)
    print(f"conch: starting tritonserver of {command.origin}", file=sys.stderr, flush=True)

    def announce(models: Iterable[ModelState], seconds: float) -> None:
        print(banner(models, command.endpoints, seconds), file=sys.stderr, flush=True)

    Supervisor(command, announce).run()
    return 0


def banner(models: Iterable[ModelState], endpoints: Endpoints, seconds: float) -> str:
    """Return what is shown when the server is ready."""
    ready = [model.name for model in models if model.is_ready]
    lines = [f"conch: ready after {seconds:.1f} s, serving {', '.join(ready) or 'no model yet'}"]
    suffixes = {"http": "", "grpc": "", "metrics": "/metrics"}
    lines += [
        f"  {name:8} {endpoints.reachable(name)}{suffix}"
        for name, suffix in suffixes.items()
        if endpoints.port[name] is not None
    ]
    if ready and endpoints.port["http"] is not None:
        request = {"text_input": "The sea is", "parameters": {"max_tokens": 32, "stream": True}}
        lines.append(
            f"  try      curl -N {endpoints.reachable('http')}/v2/models/{ready[0]}/generate_stream "
            f"-d '{json.dumps(request)}'"
        )
    return "\n".join(lines)


def _repositories(options: argparse.Namespace) -> list[Path]:
    if options.repositories:
        if options.model is not None or options.model_name is not None or options.instances is not None:
            raise ConfigError(
                "--repository holds its own models; leave out --model, --model-name and --instances"
            )
        for path in options.repositories:
            if not path.is_dir():
                raise ConfigError(f"--repository {path} is not a folder")
        return list(options.repositories)
    name = options.model_name or default_name(options.model)
    settings = {"model": model_reference(options.model)}
    instances = 1 if options.instances is None else options.instances
    return [model_repository(ModelEntry(name, settings, instances))]
