"""Experiments on scheduling and KV memory, one in each module: ``measure(bench) -> dict``."""
