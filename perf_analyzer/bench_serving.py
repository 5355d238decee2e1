"""`make bench-serving`: all serving experiments in one run, one JSON, one table, one last line of JSON."""

from __future__ import annotations

import sys

from loadgen import processes, report
from serving_experiments.suite import Suite, title_of

EXPERIMENTS = (
    "concurrency_sweep",
    "triton_over_bare",
    "one_stream",
    "static_batching",
    "chunked_prefill",
    "shared_prefix",
    "kv_waste",
)
HEADLINE = {
    "triton_over_bare_c16": "tokens/s through Triton over the engine in process, 16 at a time",
    "triton_in_pieces_over_bare_c16": "the same with stream_interval 4",
    "host_over_bare_host_c16": "served tokens/s over those behind the barest host, 16 streams",
    "host_adds_ms_c1": "milliseconds that conch's host adds to the time of a token, one stream",
    "triton_adds_ms_c1": "milliseconds that Triton adds to the time of a token, one stream",
    "continuous_over_static": "tokens/s over transformers.generate, padded batches of the same size",
    "itl_p99_chunked_over_quiet": "decode p99 ITL while a 4,000-token prompt arrives, over quiet",
    "itl_p99_unchunked_over_quiet": "the same without chunked prefill",
    "ttft_shared_prefix_on_over_off": "median TTFT of 32 requests sharing 1,024 tokens, cache on over off",
    "kv_waste_fraction": "allocated KV slots that hold nothing, mixed lengths",
}


def main() -> int:
    """Run, write, print."""
    processes.unwind_on_sigterm()
    suite = Suite("serving", EXPERIMENTS, tuple(HEADLINE))
    arguments = suite.parse_arguments(__doc__)
    output, errors = report.consoles()
    found = suite.run(arguments, errors)
    if "concurrency_sweep" in found.results:
        output.print(report.latency_table("Concurrency", found.results["concurrency_sweep"]["concurrency"]))
    output.print(report.headline_table(title_of(found, "Serving"), found.headline, HEADLINE))
    output.print(f"written to {found.path}", markup=False, soft_wrap=True)
    report.print_last_line(output, found.headline)
    return 1 if found.failures else 0


if __name__ == "__main__":
    sys.exit(main())
