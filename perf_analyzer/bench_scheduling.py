"""`make bench-scheduling`: scheduling and KV memory, with and without a model.

Writes one JSON and a plot, prints one table, and last a line of JSON with the headline figures.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loadgen import processes, report
from serving_experiments.suite import Suite, title_of

EXPERIMENTS = (
    "planning_cost",
    "hit_rate",
    "zero_hit_cost",
    "fairness",
    "slo_attainment",
    "kv_waste",
    "long_prompt",
)
HEADLINE = {
    "plan_us_per_row": "host's work on a decode step, microseconds a row, by rows",
    "plan_over_vllm": "the same over vLLM's own scheduler on the same trace, by rows",
    "kv_waste_fraction": "allocated KV slots that hold nothing, mixed lengths",
    "itl_p99_chunked_over_quiet": "decode p99 ITL while a 6,000-token prompt arrives, over quiet",
    "hit_rate_over_oracle": "tokens found over those that a perfect, endless cache finds, by cache",
    "zero_hit_cost": "tokens/s with a prefix cache that finds nothing, over without",
    "fair_service_gap_over_bound": "most that two tenants' service differs, over the VTC paper's bound",
    "slo_attainment": "requests whose targets are met, by load and scheduler, simulated",
}


def draw(results: Mapping[str, Any], path: Path) -> str | None:
    """Draw what is better seen than read beside the result; returns why not, where matplotlib is missing."""
    if "slo_attainment" not in results:
        return None
    try:
        from scheduling_experiments.plots import attainment_against_load
    except ImportError as error:
        return f"not drawn: {error}; pip install 'conch[bench]'"
    attainment_against_load(results["slo_attainment"], path.with_name(f"{path.stem}-attainment.png"))
    return None


def main() -> int:
    """Run, write, print."""
    processes.unwind_on_sigterm()
    suite = Suite("scheduling", EXPERIMENTS, tuple(HEADLINE))
    arguments = suite.parse_arguments(__doc__)
    output, errors = report.consoles()
    found = suite.run(arguments, errors)
    output.print(report.nested_table(title_of(found, "Scheduling"), found.headline, HEADLINE))
    if excuse := draw(found.results, found.path):
        output.print(excuse, markup=False)
    output.print(f"written to {found.path}", markup=False, soft_wrap=True)
    report.print_last_line(output, found.headline)
    return 1 if found.failures else 0


if __name__ == "__main__":
    sys.exit(main())
