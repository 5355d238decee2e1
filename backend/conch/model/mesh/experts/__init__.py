"""Experts divided among ranks: who has which, how tokens reach them, what moves when the load is uneven."""
