"""Heads that draft from the target's hidden states: EAGLE."""
