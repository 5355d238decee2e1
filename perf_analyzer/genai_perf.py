"""Shows that NVIDIA's genai-perf works unchanged against a served model, as with Triton's vLLM backend.

It gets a virtual environment of its own under `.cache/` (made once), since it pins much that conch does not.
Without ``--url`` a server is started for it and ended afterwards.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path

from loadgen.machine import ROOT
from loadgen.perf_binary import PerfAnalyzer, find_or_install
from loadgen.served import ServedModel
from loadgen.worker import Worker
from serving_experiments.bench import DEMO_MODEL

VERSION = "0.0.16"
HOME = ROOT / ".cache" / f"genai-perf-{VERSION}"
RUN_TIMEOUT_S = 600


def program() -> Path:
    """Return genai-perf's executable, installing it first where needed.

    The environment is complete only once its marker exists: an interrupted installation is done over.
    """
    marker = HOME / "complete"
    if not marker.exists():
        print(f"installing genai-perf {VERSION} into {HOME} (once)", file=sys.stderr)
        venv.create(HOME, with_pip=True, clear=True)
        command = [str(HOME / "bin" / "python"), "-m", "pip", "install", "--quiet", f"genai-perf=={VERSION}"]
        subprocess.run(command, check=True)
        marker.touch()
    return HOME / "bin" / "genai-perf"


def environment(binary: PerfAnalyzer, folder: Path) -> dict[str, str]:
    """Return an environment in which `perf_analyzer` on PATH is a script that runs `binary`.

    genai-perf runs perf_analyzer by name; its own programs must not see the libraries that it needs.
    """
    script = folder / "perf_analyzer"
    kept = ("LD_LIBRARY_PATH", "GLIBC_TUNABLES")
    settings = " ".join(f"{key}={shlex.quote(binary.environment.get(key, ''))}" for key in kept)
    script.write_text(f'#!/bin/sh\n{settings} exec {shlex.quote(str(binary.path))} "$@"\n')
    script.chmod(0o755)
    paths = [str(folder), str(HOME / "bin"), os.environ.get("PATH", os.defpath)]
    return {**os.environ, "PATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}


@contextlib.contextmanager
def server_url(url: str | None, serve_command: str | None) -> Iterator[str]:
    """Yield the gRPC address to measure; a server is started where none is given."""
    if url is not None:
        yield url
        return
    command = serve_command or f"{Path(sys.executable).parent / 'conch'} serve"
    with ServedModel(shlex.split(command)) as server:
        yield server.grpc_url


def demo_folder() -> str:
    """Return the folder into which the engine converted the demo model, tokenizer included."""
    with Worker("engine_worker.py", {"settings": {"model": DEMO_MODEL}}) as engine:
        return str(engine.ready["model_folder"])


def main() -> int:
    """Run genai-perf and pass on its table and exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="HOST:PORT of a server's gRPC; the default starts one")
    parser.add_argument("--serve-command", help="what starts the server; the default is `conch serve`")
    parser.add_argument("--model-name", default="smollm2")
    parser.add_argument("--tokenizer", help="folder with the model's tokenizer; the demo model's by default")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--requests", type=int, default=16)
    arguments = parser.parse_args()
    tokenizer = arguments.tokenizer or demo_folder()
    genai_perf, binary = program(), find_or_install()
    with tempfile.TemporaryDirectory(prefix="conch-genai-perf-") as scratch:
        env = environment(binary, Path(scratch))
        with server_url(arguments.url, arguments.serve_command) as url:
            command = [str(genai_perf), "profile", "-m", arguments.model_name, "--endpoint-type", "kserve"]
            command += ["--backend", "vllm", "--streaming", "-u", url, "--tokenizer", tokenizer]
            command += [
                "--concurrency",
                str(arguments.concurrency),
                "--request-count",
                str(arguments.requests),
            ]
            command += ["--synthetic-input-tokens-mean", "64", "--output-tokens-mean", "32"]
            command += ["--artifact-dir", str(Path(scratch, "artifacts"))]
            return subprocess.run(
                command, env=env, cwd=scratch, timeout=RUN_TIMEOUT_S, check=False
            ).returncode


if __name__ == "__main__":
    sys.exit(main())
