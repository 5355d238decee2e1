"""Prefix caches: which blocks hold the KV of which tokens."""
