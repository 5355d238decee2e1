"""Paged attention in C++ (`cpu/attention.h`), as a torch operation.

Letters: T tokens, R rows, B blocks, H query heads, K KV heads, D head size, N blocks in the pool, S tokens in
a block.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch

from conch_kernels.cpu.library import Team, library
from conch_kernels.paged import Scores

_I32, _I64, _F32, _PTR = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p

LANES = 16
_SCALE_BYTES = 4
DTYPES = (torch.float32, torch.bfloat16)


class KvLayout(ctypes.Structure):
    """How KV lies in the pool; see kv.h."""

    _fields_ = (
        ("heads", _I32),
        ("key_size", _I32),
        ("value_size", _I32),
        ("block_size", _I32),
        ("is_int8", _I32),
    )

    def pool_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Shape of one layer's pool, ``[2, N, K, S, D]``; sizes are rounded up to LANES.

        int8 has four bytes more in D: the scale of a token's key or value, wherever it lies.
        """
        tokens, depth = _round_up(self.block_size), _round_up(max(self.key_size, self.value_size))
        return (2, num_blocks, self.heads, tokens, depth + _SCALE_BYTES * bool(self.is_int8))


class NativeRows(ctypes.Structure):
    """The rows of a step; see attention_plan.h."""

    _fields_ = (
        *((name, _PTR) for name in ("cu_query", "seq_lens", "block_tables", "slots", "positions")),
        *((name, _I32) for name in ("rows", "tokens", "stride", "reserved")),
    )


class AttentionConstants(ctypes.Structure):
    """How scores are made; see attention_tile.h."""

    _fields_ = (("scale", _F32), ("softcap", _F32), ("sinks", _PTR))


class _Call(ctypes.Structure):
    """One layer's attention; see attention.cpp."""

    _fields_ = (
        *((name, _PTR) for name in ("query", "key", "value")),
        *(
            (name, _I64)
            for name in (
                "query_token",
                "query_head",
                "key_token",
                "key_head",
                "value_token",
                "value_head",
            )
        ),
        *((name, _PTR) for name in ("pool_keys", "pool_values", "out")),
        ("constants", AttentionConstants),
        ("window", _I32),
        ("is_bf16", _I32),
    )


class NativeAttention:
    """Attention for one shape of heads, and the team of threads that computes it.

    The team has as many members as torch has threads when the first step is planned.

    Parameters
    ----------
    heads
        H; a multiple of the layout's.
    layout
        How KV lies in the pool.
    native
        The compiled library; by default the one for this machine.
    """

    def __init__(self, heads: int, layout: KvLayout, native: ctypes.CDLL | None = None) -> None:
        self._native = native or library()
        _declare(self._native)
        self.heads = heads
        self.layout = layout
        self._team: Team | None = None
        self._handle = _PTR()

    @property
    def team(self) -> Team:
        """The threads."""
        if self._team is None:
            self._team = Team(torch.get_num_threads(), self._native)
            self._handle = _PTR(self._native.conch_attention_new(self._team.handle))
        return self._team

    def plan_rows(self, rows: Sequence[torch.Tensor]) -> NativePlan:
        """Plan a step.

        Parameters
        ----------
        rows
            cu_query, seq_lens, block_tables, slot_mapping and positions of a `conch.api.StepBatch`.
        """
        return NativePlan(self._native, self.team, self._handle, rows, (self.heads, self.layout))

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._native.conch_attention_free(self._handle)
            self._handle = _PTR()


class NativePlan:
    """A step's rows where native code finds them. Its work is cut when the first layer of each window comes.

    Attributes
    ----------
    rows
        The rows.
    team
        Who computes them.
    """

    def __init__(
        self,
        native: ctypes.CDLL,
        team: Team,
        attention: ctypes.c_void_p,
        rows: Sequence[torch.Tensor],
        shape: tuple[int, KvLayout],
    ) -> None:
        cu_query, seq_lens, tables, slots, positions = self._kept = [part.contiguous() for part in rows]
        assert cu_query.dtype == seq_lens.dtype == tables.dtype == torch.int32
        assert slots.dtype == positions.dtype == torch.int64
        self._native, self._attention, self._shape = native, attention, shape
        self.team = team
        self.rows = NativeRows(
            *(part.data_ptr() for part in self._kept),
            seq_lens.shape[0],
            slots.shape[0],
            tables.stride(0),
        )

    @functools.cached_property
    def handles(self) -> torch.Tensor:
        """Addresses that `paged_attention` needs, in a tensor as they change with each step: int64 [2]."""
        return torch.tensor([self._attention.value, self._plans.value], dtype=torch.int64)

    @functools.cached_property
    def _plans(self) -> ctypes.c_void_p:
        """Made when the operation asks for it: a fused decoder plans for itself."""
        heads, layout = self._shape
        return _PTR(
            self._native.conch_attention_plans_new(
                self._attention, ctypes.byref(self.rows), ctypes.byref(layout), heads
            )
        )

    def tasks(self, window: int | None) -> tuple[int, int]:
        """Return how many tasks the layers with this window have, and how many are parts of larger ones."""
        tasks, parts = ctypes.c_int(), ctypes.c_int()
        self._native.conch_attention_tasks(self._plans, window or 0, ctypes.byref(tasks), ctypes.byref(parts))
        return tasks.value, parts.value

    def __del__(self) -> None:
        if plans := self.__dict__.pop("_plans", None):
            self._native.conch_attention_plans_free(plans)


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv: torch.Tensor,
    plan: NativePlan,
    scores: Scores,
) -> torch.Tensor:
    """Write KV into the pool, then let every query attend to its own row's past.

    Parameters
    ----------
    query : [T, H, D]
    key : [T, K, D]
    value : [T, K, Dv]
        All of one dtype of `DTYPES`.
    kv : of `KvLayout.pool_shape`
        Written in place; of the same dtype, or int8 where the layout says so.
    plan
        The step's rows.
    scores
        How scores are made.

    Returns
    -------
    [T, H, Dv], of the dtype of `query`.
    """
    sinks = None if scores.sinks is None else scores.sinks.float().contiguous()
    output: torch.Tensor = torch.ops.conch.paged_attention(
        query,
        key,
        value,
        kv,
        plan.handles,
        [scores.scale, scores.window or 0, scores.softcap or 0],
        sinks,
    )
    return output


def _paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv: torch.Tensor,
    handles: torch.Tensor,
    constants: Sequence[float],
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    query, key, value = (part if part.stride(2) == 1 else part.contiguous() for part in (query, key, value))
    assert query.dtype == key.dtype == value.dtype and kv.dtype in (query.dtype, torch.int8)
    assert kv.is_contiguous()
    out = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
    scale, window, softcap = constants
    call = _Call(
        *(part.data_ptr() for part in (query, key, value)),
        *(stride for part in (query, key, value) for stride in part.stride()[:2]),
        kv.data_ptr(),
        kv.data_ptr() + kv.stride(0) * kv.element_size(),
        out.data_ptr(),
        AttentionConstants(scale, softcap, None if sinks is None else sinks.data_ptr()),
        int(window),
        query.dtype == torch.bfloat16,
    )
    attention, plans = handles.tolist()
    library().conch_attention_run(_PTR(attention), _PTR(plans), ctypes.byref(call))
    return out


def _fake(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value.shape[2])


_operations: Any = torch.library.Library("conch", "FRAGMENT")  # type: ignore[no-untyped-call]
_operations.define(
    "paged_attention(Tensor query, Tensor key, Tensor value, Tensor(a!) kv, Tensor handles, "
    "float[] constants, Tensor? sinks) -> Tensor"
)
_operations.impl("paged_attention", _paged_attention, "CPU")
torch.library.register_fake("conch::paged_attention", _fake, lib=_operations)


def _round_up(size: int) -> int:
    return -(-size // LANES) * LANES


def _declare(native: ctypes.CDLL) -> None:
    """State what returns addresses, and fail where a structure here and in C++ have drifted apart."""
    for name in ("conch_attention_new", "conch_attention_plans_new"):
        getattr(native, name).restype = _PTR
    mirrored = (KvLayout, NativeRows, AttentionConstants, _Call)
    sizes = (_I64 * len(mirrored))()
    native.conch_attention_sizes(sizes)
    for kind, size in zip(mirrored, sizes, strict=True):
        assert ctypes.sizeof(kind) == size, f"{kind.__name__} has {ctypes.sizeof(kind)} bytes, not {size}"
