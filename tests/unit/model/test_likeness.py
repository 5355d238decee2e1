"""Checkpoints of several hosts are compared, wherever they lie and however they are divided."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from conch.api import CheckpointError
from conch.api.mesh import MeshShape, Seat
from conch.engine.mesh.meeting import Meeting
from conch.model.mesh.likeness import Likeness, check_alike

PARAMETERS = "the names, shapes or types of parameters"


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "one"
    folder.mkdir()
    weights = {f"w{index}": torch.full((3, 2), index, dtype=torch.bfloat16) for index in range(40)}
    save_file({**weights, "scalar": torch.tensor(1.0)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "transformers_version": "5.1"}))
    return folder


def changed(folder, tmp_path, config=None, **weights):
    copy = shutil.copytree(folder, tmp_path / "other")
    if config:
        (copy / "config.json").write_text(json.dumps(config))
    if weights:
        stored = load_file(copy / "model.safetensors")
        save_file({**stored, **weights}, copy / "model.safetensors")
    return copy


def test_another_place_version_and_division_into_files_make_no_difference(checkpoint, tmp_path):
    config = {"transformers_version": "5.2", "model_type": "llama", "_name_or_path": "elsewhere"}
    copy = changed(checkpoint, tmp_path, config)
    weights = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    first, second = ({name: weights[name] for name in sorted(weights)[part::2]} for part in (0, 1))
    save_file(first, copy / "a.safetensors")
    save_file(second, copy / "b.safetensors")
    assert Likeness.of(copy) == Likeness.of(checkpoint)


@pytest.mark.parametrize(
    ("config", "weights", "found"),
    [
        ({"model_type": "qwen3"}, {}, ["config.json"]),
        (None, {"extra": torch.zeros(2)}, [PARAMETERS, "weights"]),
        (None, {"scalar": torch.tensor(1.0, dtype=torch.float16)}, [PARAMETERS]),
        (None, {f"w{index}": torch.zeros(3, 2, dtype=torch.bfloat16) for index in range(40)}, ["weights"]),
    ],
)
def test_what_differs_is_named(checkpoint, tmp_path, config, weights, found):
    other = changed(checkpoint, tmp_path, config, **weights)
    assert Likeness.of(other).differences(Likeness.of(checkpoint)) == found


def test_a_rank_with_another_checkpoint_than_rank_0_is_refused(checkpoint, tmp_path):
    other = changed(checkpoint, tmp_path, {"model_type": "qwen3"})
    meeting, shape = Meeting("127.0.0.1"), MeshShape(3, 1)
    check_alike(checkpoint, Seat(0, shape, 1.0), meeting)
    check_alike(checkpoint, Seat(1, shape, 1.0), meeting)
    with pytest.raises(CheckpointError, match=r"other is not the checkpoint of rank 0: other config\.json"):
        check_alike(other, Seat(2, shape, 1.0), meeting)
