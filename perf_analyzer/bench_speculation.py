"""`make bench-speculation`: what drafters gain, by workload, batch size and drafts in a row.

Writes one JSON, prints one table, and last a line of JSON with the headline figures. A run that is recorded
in `results/` also writes the figures of `speculation.md`.
"""

from __future__ import annotations

import sys

from loadgen import processes, report
from serving_experiments.suite import Suite, title_of
from speculation_experiments import page

EXPERIMENTS = ("drafters", "batch_and_k", "vllm_ngram")
HEADLINE = {
    "speedup": "decode tokens/s with the drafter over without, back-off on",
    "acceptance_length": "tokens that a row with drafts brings, its own one among them",
    "min_speedup_c16_with_backoff": "the least of the gains at 16 streams",
    "over_vllm_ngram": "one stream that copies: tokens/s over vLLM's, both with ngram",
}


def main() -> int:
    """Run, write, print."""
    processes.unwind_on_sigterm()
    suite = Suite("speculation", EXPERIMENTS, tuple(HEADLINE))
    arguments = suite.parse_arguments(__doc__)
    output, errors = report.consoles()
    found = suite.run(arguments, errors)
    output.print(report.nested_table(title_of(found, "Speculation"), found.headline, HEADLINE))
    output.print(f"written to {found.path}", markup=False, soft_wrap=True)
    if not found.quick and arguments.output is None:
        page.rewrite(found.results, found.path)
    report.print_last_line(output, found.headline)
    return 1 if found.failures else 0


if __name__ == "__main__":
    sys.exit(main())
