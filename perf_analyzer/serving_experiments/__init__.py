"""One experiment in each module: ``measure(bench) -> dict``, honest, repeatable, and small enough to read."""
