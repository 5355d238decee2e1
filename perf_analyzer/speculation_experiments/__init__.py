"""Experiments on drafters, one in each module: ``measure(bench) -> dict``."""
