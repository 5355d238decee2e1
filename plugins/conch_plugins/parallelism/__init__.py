"""Parallelism: which ranks run a plan."""
