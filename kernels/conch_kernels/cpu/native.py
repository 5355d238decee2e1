"""The structures of decoder.h, field by field, and a decoder that is made of them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from conch_kernels.cpu.library import Team, library
from conch_kernels.cpu_attention import AttentionConstants, KvLayout, NativeRows

_I32, _I64, _F32, _PTR = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
"""In the order of decoder.h."""


class Matrix(ctypes.Structure):
    """A packed weight matrix; see matrix.h."""

    _fields_ = (
        ("panels", _PTR),
        ("bias", _PTR),
        ("depth", _I32),
        ("columns", _I32),
        ("format", _I32),
        ("reserved", _I32),
    )


class Norm(ctypes.Structure):
    """A normalisation; see norm.h. With a null weight it leaves rows as they are."""

    _fields_ = (("weight", _PTR), ("eps", _F32), ("reserved", _I32))


class Layer(ctypes.Structure):
    """One decoder layer."""

    _fields_ = (
        *((name, Norm) for name in ("attention_in", "query", "key", "attention_out", "mlp_in", "mlp_out")),
        *((name, Matrix) for name in ("qkv", "out", "up", "down")),
        ("attention", AttentionConstants),
        ("rope", _PTR),
        ("window", _I32),
        ("reserved", _I32),
    )


class Entry(ctypes.Structure):
    """The way into a head that drafts; see entry.h."""

    _fields_ = (
        ("fusing", Matrix),
        *((name, Norm) for name in ("target", "embedding", "state")),
        ("normed_residual", _I32),
        ("reserved", _I32),
    )


class DecoderSpec(ctypes.Structure):
    """A whole decoder."""

    _fields_ = (
        ("layers", ctypes.POINTER(Layer)),
        ("entry", ctypes.POINTER(Entry)),
        ("embedding", _PTR),
        ("head", Matrix),
        ("final", Norm),
        *(
            (name, _I32)
            for name in (
                "num_layers",
                "hidden",
                "heads",
                "kv_heads",
                "head_size",
                "inner",
                "rotary",
                "element",
                "activation",
                "norm_whole_rows",
            )
        ),
        *((name, _F32) for name in ("embedding_scale", "residual_scale", "logit_scale", "logit_softcap")),
        ("kv", KvLayout),
    )


class Step(ctypes.Structure):
    """One step."""

    _fields_ = (
        ("rows", NativeRows),
        ("input_ids", _PTR),
        ("logit_rows", _PTR),
        ("pools", _PTR),
        ("logits", _PTR),
        ("likeliest", _PTR),
        ("pool_half", _I64),
        ("states", _PTR),
        ("state_layers", _PTR),
        ("given", _PTR),
        ("outputs", _PTR),
        ("num_logit_rows", _I32),
        ("num_states", _I32),
        ("from_target", _I32),
        ("reserved", _I32),
    )


def check_sizes(native: ctypes.CDLL) -> None:
    """Fail where a structure here and in C++ have drifted apart."""
    mirrored = (Matrix, Norm, Layer, Entry, DecoderSpec, Step)
    sizes = (_I64 * (len(mirrored) + 1))()
    native.conch_sizes(sizes)
    for kind, size in zip(mirrored, sizes):  # noqa: B905 - the last is LIKELIEST
        assert ctypes.sizeof(kind) == size, f"{kind.__name__} has {ctypes.sizeof(kind)} bytes, not {size}"
    assert LIKELIEST.itemsize == sizes[-1]


LIKELIEST = np.dtype([("value", np.float32), ("column", np.int64)], align=True)
"""The largest logit of a row and where it is first; see likeliest.h."""


class NativeDecoder:
    """A decoder in native memory.

    Parameters
    ----------
    spec
        Its description; copied.
    kept
        Whatever owns the memory that the description points to.
    """

    def __init__(self, spec: DecoderSpec, kept: Sequence[object]) -> None:
        self._native = library()
        check_sizes(self._native)
        self._native.conch_decoder_new.restype = _PTR
        self._kept = tuple(kept)
        self._element = spec.element
        self._vocabulary = spec.head.columns
        self.hidden = int(spec.hidden)
        self._logits = torch.empty(0, self._vocabulary)
        self._handle = _PTR(self._native.conch_decoder_new(ctypes.byref(spec)))

    def run(self, team: Team, step: Step) -> tuple[torch.Tensor, npt.NDArray[np.void]]:
        """Do a step.

        Returns
        -------
        logits : float32 [L, V]
            Overwritten by the next step.
        likeliest : LIKELIEST [L]
        """
        count = step.num_logit_rows
        if count > self._logits.shape[0]:
            self._logits = torch.empty(count, self._vocabulary)
        logits, likeliest = self._logits[:count], np.empty(count, LIKELIEST)
        step.logits, step.likeliest = logits.data_ptr(), likeliest.ctypes.data
        self._native.conch_decoder_run(self._handle, self._element, team.handle, ctypes.byref(step))
        return logits, likeliest

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._native.conch_decoder_free(self._handle, self._element)
            self._handle = _PTR()
