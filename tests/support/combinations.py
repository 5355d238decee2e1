"""Which plugins are combined: every scheduler, cache, way to preempt and drafter that is installed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from conch.api import EngineConfig, SpeculativeConfig
from conch.engine.catalogue import Catalogue
from support.eagle import eagle3_config, eagle3_tensors, write_head
from support.tiny import tiny_checkpoint

BLOCK, POOL, BUDGET, SEATS = 8, 24, 24, 12
POOL_TOKENS = BLOCK * POOL
BLOCK_BYTES = 2 * 2 * 2 * BLOCK * 12 * 4
"""Two layers of keys and values, two heads of 12 numbers in fp32."""
PREEMPTIONS: dict[str, dict[str, Any]] = {
    "recompute": {"preemption_mode": "recompute"},
    "swap": {"preemption_mode": "swap", "swap_space_bytes": 1 << 20},
}
TIERS = {"prefix_host_bytes": 16 * BLOCK_BYTES, "prefix_disk_bytes": 400 * BLOCK_BYTES}
TIERED = ("hash", "radix")
"""Caches that keep what has to leave the pool."""
CERTAIN = ("none", "ngram", "suffix")
"""Drafters that draw nothing: sampled answers are to the token those without drafts."""


def model() -> str:
    """Return the checkpoint that all of them serve."""
    return str(tiny_checkpoint("llama"))


@dataclass(frozen=True)
class Cache:
    """A prefix cache, with lower tiers or without."""

    name: str
    has_tiers: bool = False

    def __str__(self) -> str:
        return f"{self.name} + tiers" if self.has_tiers else self.name

    @property
    def finds(self) -> bool:
        return self.name != "none"


@dataclass(frozen=True)
class Cell:
    """One engine: a choice for each seam."""

    scheduler: str
    cache: Cache
    preemption: str
    drafter: str
    kv_manager: str

    def __str__(self) -> str:
        return ", ".join(str(choice) for choice in self.choices)

    @property
    def choices(self) -> tuple[Any, ...]:
        return (self.scheduler, self.cache, self.preemption, self.drafter, self.kv_manager)

    @property
    def pairs(self) -> set[tuple[tuple[int, Any], tuple[int, Any]]]:
        """What it combines, two at a time."""
        return set(itertools.combinations(enumerate(self.choices), 2))

    def config(self) -> EngineConfig:
        """Return an engine of a small pool and small steps."""
        return EngineConfig(
            model=model(),
            dtype="float32",
            num_threads=1,
            seed=1,
            attention_kernel="cpu",
            block_size=BLOCK,
            num_gpu_blocks_override=POOL,
            max_num_batched_tokens=BUDGET,
            max_num_seqs=SEATS,
            ttft_target_s=100.0,  # met however busy the machine is, so that as many run at once everywhere
            tpot_target_s=10.0,
            scheduler=self.scheduler,
            kv_manager=self.kv_manager,
            prefix_cache=self.cache.name,
            speculative_config=_drafting(self.drafter),
            **PREEMPTIONS[self.preemption],
            **(TIERS if self.cache.has_tiers else {}),
        )


def _drafting(drafter: str) -> SpeculativeConfig | None:
    """Return settings under which a drafter has something to say; the target drafts for itself."""
    if drafter == "none":
        return None
    own: dict[str, dict[str, Any]] = {
        "ngram": {"prompt_lookup_min": 1, "prompt_lookup_max": 4},
        "draft_model": {"model": model(), "num_speculative_tokens": 3},
        "eagle": {"model": str(write_head(eagle3_tensors(), eagle3_config())), "num_speculative_tokens": 3},
    }
    return SpeculativeConfig(method=drafter, backoff=False, **own.get(drafter, {}))


@dataclass(frozen=True)
class Product:
    """The names that are combined, each with each."""

    schedulers: tuple[str, ...]
    caches: tuple[Cache, ...]
    drafters: tuple[str, ...]
    kv_managers: tuple[str, ...]

    @classmethod
    def of(cls, records: Iterable[dict[str, str]]) -> Product:
        """Take what a catalogue describes."""
        names: dict[str, list[str]] = {}
        for record in records:
            names.setdefault(record["seam"], []).append(record["name"])
        caches = [Cache(name) for name in sorted(names["prefix_cache"], key=_none_first)]
        caches += [Cache(cache.name, has_tiers=True) for cache in caches if cache.name in TIERED]
        return cls(
            schedulers=tuple(names["scheduler"]),
            caches=tuple(caches),
            drafters=tuple(sorted(names["drafter"], key=_none_first)),
            kv_managers=tuple(names["kv_manager"]),
        )

    @classmethod
    def installed(cls) -> Product:
        return cls.of(Catalogue.load().describe())

    @classmethod
    def built_in(cls) -> Product:
        return cls.of(record for record in Catalogue.load().describe() if record["plugin"] == "builtin")

    def cells(self) -> list[Cell]:
        choices = (self.schedulers, self.caches, tuple(PREEMPTIONS), self.drafters, self.kv_managers)
        return [Cell(*each) for each in itertools.product(*choices)]


def _none_first(name: str) -> tuple[bool, str]:
    return name != "none", name


def pairwise(cells: Sequence[Cell]) -> list[Cell]:
    """Return few cells in which every two choices that combine at all are combined, the best first."""
    missing = set().union(*(cell.pairs for cell in cells))
    chosen = []
    while missing:
        best = max(cells, key=lambda cell: len(cell.pairs & missing))
        chosen.append(best)
        missing -= best.pairs
    return chosen
