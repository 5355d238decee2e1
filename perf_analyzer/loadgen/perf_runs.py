"""Runs perf_analyzer over gRPC streaming and reads back every timestamp that it took."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from loadgen.grpc_client import GenerateRequest
from loadgen.latency import Arrival, Trace
from loadgen.perf_binary import PerfAnalyzer

NANOSECONDS = 1e-9
TIMEOUT_S = 900
ATTEMPTS = 3
_ENDED = ("stop", "length", "cancelled")


class PerfAnalyzerFailed(RuntimeError):
    """perf_analyzer ended with an error; the message holds what it printed."""


def input_data(requests: Iterable[GenerateRequest]) -> dict[str, Any]:
    """Return perf_analyzer's input JSON: it sends the entries in turn and starts over at the end."""
    return {
        "data": [
            {
                "text_input": [request.text],
                "stream": [True],
                "exclude_input_in_output": [True],
                "return_finish_reason": [True],
                "return_num_input_tokens": [True],
                "return_num_output_tokens": [True],
                "sampling_parameters": [json.dumps(dict(request.sampling))],
            }
            for request in requests
        ]
    }


def run(
    binary: PerfAnalyzer,
    grpc_url: str,
    requests: Sequence[GenerateRequest],
    concurrency: int,
    *,
    model: str = "smollm2",
) -> list[Trace]:
    """Send each request once, `concurrency` of them at a time, and return what was seen of each.

    perf_analyzer deals the requests out beforehand: its k-th slot sends k, k + concurrency, and so on, and
    the traces come back slot by slot. Where it leaves an empty export (see `perf_binary.ONE_HEAP`) all is
    sent again: a server that remembers prompts would answer that faster.

    Raises
    ------
    PerfAnalyzerFailed
        It ended with an error, ran over `TIMEOUT_S`, left no export several times, or did not see as many
        requests as it was given.
    """
    for _ in range(ATTEMPTS):
        export = _export(binary, grpc_url, requests, ["--concurrency-range", str(concurrency), "-m", model])
        if export:
            break
    else:
        raise PerfAnalyzerFailed(f"an empty export, {ATTEMPTS} times")
    traces = parse_export(json.loads(export))
    if len(traces) != len(requests):
        raise PerfAnalyzerFailed(f"sent {len(requests)} requests but recorded {len(traces)}")
    return traces


def _export(
    binary: PerfAnalyzer, grpc_url: str, requests: Sequence[GenerateRequest], flags: Sequence[str]
) -> str:
    """Run once and return the text of the export."""
    with tempfile.TemporaryDirectory(prefix="conch-perf-") as folder:
        data, export = Path(folder, "input.json"), Path(folder, "export.json")
        data.write_text(json.dumps(input_data(requests)))
        command = [str(binary.path), "-u", grpc_url, "-i", "grpc", "--streaming", "--async", *flags]
        command += ["--input-data", str(data), "--request-count", str(len(requests))]
        command += ["--profile-export-file", str(export)]
        try:
            done = subprocess.run(
                command,
                env=dict(binary.environment),
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise PerfAnalyzerFailed(f"no end after {TIMEOUT_S} s: {' '.join(command)}") from error
        if done.returncode or not export.exists():
            raise PerfAnalyzerFailed(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        return export.read_text()


def parse_export(export: Mapping[str, Any]) -> list[Trace]:
    """Return the requests of the only experiment of a profile export.

    Raises
    ------
    ValueError
        The export holds none or several.
    """
    experiments = export["experiments"]
    if len(experiments) != 1:
        raise ValueError(f"expected one experiment in the export, found {len(experiments)}")
    return [_trace(request) for request in experiments[0]["requests"]]


def _trace(request: Mapping[str, Any]) -> Trace:
    outputs: list[Mapping[str, Any]] = request.get("response_outputs", [])
    arrivals = []
    for at_ns, output in zip(request["response_timestamps"], outputs, strict=True):
        count = int(output.get("num_output_tokens", 1 if "text_output" in output else 0))
        if count:
            arrivals.append(Arrival(at_ns * NANOSECONDS, count))
    reasons = [output["finish_reason"] for output in outputs if output.get("finish_reason") in _ENDED]
    num_prompt = [int(output["num_input_tokens"]) for output in outputs if "num_input_tokens" in output]
    return Trace(
        sent_s=request["timestamp"] * NANOSECONDS,
        arrivals=tuple(arrivals),
        finish_reason=reasons[-1] if reasons else None,
        num_prompt=num_prompt[-1] if num_prompt else None,
        text="".join(str(output.get("text_output", "")) for output in outputs),
    )
