"""Schedulers: who computes how many tokens in a step."""
