"""`make bench-parallel`: what dividing a model costs, how busy stages are, what routers make of replicas.

Writes one JSON, prints one table, and last a line of JSON with the headline figures.
"""

from __future__ import annotations

import sys

from loadgen import processes, report
from serving_experiments.suite import Suite, title_of

EXPERIMENTS = ("pipeline", "traffic", "routing")
HEADLINE = {
    "pp2_utilisation_of_ideal_8": "8 in flight over two stages: time in which the slowest computed, over all",
    "bubble_fraction": "share of their time that both stages idled, by requests in flight",
    "bytes_per_token_over_formula": "what ranks put into collectives, counted, over the formula, by topology",
    "dp_max_imbalance": "least_loaded, equal requests and a burst: how far counts lie apart, over their mean",
    "prefix_affinity_hit_rate": "prompt tokens found in the replicas' caches, shared prompts, by replicas",
    "round_robin_hit_rate": "the same, each replica in turn",
}


def main() -> int:
    """Run, write, print."""
    processes.unwind_on_sigterm()
    suite = Suite("parallel", EXPERIMENTS, tuple(HEADLINE))
    arguments = suite.parse_arguments(__doc__)
    output, errors = report.consoles()
    found = suite.run(arguments, errors)
    output.print(report.nested_table(title_of(found, "Parallelism"), found.headline, HEADLINE))
    output.print(f"written to {found.path}", markup=False, soft_wrap=True)
    report.print_last_line(output, found.headline)
    return 1 if found.failures else 0


if __name__ == "__main__":
    sys.exit(main())
