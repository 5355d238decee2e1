"""Weights from safetensors into a model, strictly."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from conch.api import CheckpointError
from conch.model.attention import IMPLEMENTATION
from conch.model.checkpoint import weight_files
from conch.model.describe import Description
from conch.model.rope import pin_rope

Progress = Callable[[str, float], None]
_STAGE = "loading weights"
_MAX_NAMES = 5


def load_module(description: Description, progress: Progress) -> Any:  # noqa: ANN401 - transformers is not typed
    """Build transformers' model with its weights on the device and in the dtype of `description`.

    Each tensor is read and converted by itself, so the peak is the model plus one tensor.

    Raises
    ------
    CheckpointError
        A parameter is missing from the checkpoint, has another shape there, or the checkpoint holds one that
        the model lacks. A head that is not tied to the embedding counts as any parameter.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()  # ours reports
    spec = description.spec
    dtype = getattr(torch, spec.attention.dtype)
    weights = _read_weights(weight_files(description.folder), dtype, description.keep_fp32, progress)
    try:
        model, report = description.model_class.from_pretrained(
            None,
            config=description.hf_config,
            state_dict=weights,
            dtype=dtype,
            attn_implementation=IMPLEMENTATION,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, with the name
            local_files_only=True,
        )
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"{description.folder}: {error}") from error
    weights.clear()
    _check_report(report, description.folder)
    pin_rope(model, spec.max_model_len)
    model.eval().requires_grad_(False).to(spec.attention.device)
    progress(_STAGE, 1.0)
    return model


def _read_weights(
    files: list[Path], dtype: torch.dtype, keep_fp32: frozenset[str], progress: Progress
) -> dict[str, torch.Tensor]:
    """Read all tensors, floating-point ones as `dtype`, into memory of their own."""
    from safetensors import SafetensorError, safe_open

    total = sum(path.stat().st_size for path in files) or 1
    done = 0
    weights: dict[str, torch.Tensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    stored = file.get_tensor(name)
                    kept = any(part in name for part in keep_fp32) or not stored.is_floating_point()
                    weights[name] = stored.to(stored.dtype if kept else dtype, copy=True)
                    done += stored.nbytes
                    progress(_STAGE, min(done / total, 1.0))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
    return weights


def _check_report(report: Any, folder: Path) -> None:  # noqa: ANN401 - transformers is not typed
    """Refuse anything but an exact fit."""
    if report["missing_keys"]:
        raise CheckpointError(f"{folder} lacks {_listed(report['missing_keys'])}")
    if report["unexpected_keys"]:
        raise CheckpointError(f"{folder} holds {_listed(report['unexpected_keys'])}, which the model lacks")
    if report["mismatched_keys"]:
        names = [str(entry[0]) for entry in report["mismatched_keys"]]
        raise CheckpointError(f"{folder} holds {_listed(names)} in another shape than its config says")
    if report["error_msgs"]:
        raise CheckpointError(f"{folder}: {'; '.join(map(str, report['error_msgs']))}")


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _MAX_NAMES} more" if len(ordered) > _MAX_NAMES else ""
    return f"parameter{'s' if len(ordered) > 1 else ''} {', '.join(ordered[:_MAX_NAMES])}{more}"
