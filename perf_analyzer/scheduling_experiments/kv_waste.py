"""KV memory that is allocated and holds nothing: as `bench-serving` measures it."""

from __future__ import annotations

from serving_experiments.kv_waste import measure

__all__ = ["measure"]
