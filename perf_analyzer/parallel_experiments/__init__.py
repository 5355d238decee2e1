"""Experiments on replicas and ranks, one in each module: ``measure(bench) -> dict``."""
