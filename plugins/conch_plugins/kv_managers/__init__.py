"""KV managers: who holds which block."""
