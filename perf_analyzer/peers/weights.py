"""The model in every format that an engine reads, made once and kept beside the venvs."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from peers import venvs
from peers.limits import ModelSize
from peers.process import Program, ProgramError, run_to_end

_OPENVINO_FORMATS = {"openvino_16bit": "fp16", "openvino_int8": "int8"}


@dataclass(frozen=True)
class Models:
    """Where each format lies; what could not be made is in `failures`."""

    paths: dict[str, str]
    size: ModelSize
    failures: dict[str, str]


def prepare(model: str, wanted: set[str]) -> Models:
    """Make what is missing of the formats `wanted`."""
    folder = venvs.cache_root() / "models" / re.sub(r"[^A-Za-z0-9.]+", "-", model)
    options = {"model": model, "folder": str(folder)}
    with Program(Path(sys.executable), "prepare_weights.py", options, start_timeout_s=300) as program:
        stored = program.ready["stored"]
    figures = json.loads((folder / "size.json").read_text())
    figures.pop("parameters")
    paths = {"bf16": str(folder / "bf16"), "gguf_bf16": str(folder / "bf16.gguf"), "gguf_stored": stored}
    failures = {}
    for name, weight_format in _OPENVINO_FORMATS.items():
        if name in wanted:
            try:
                _export(folder / "bf16", folder / name, weight_format)
                paths[name] = str(folder / name)
            except (ProgramError, OSError) as error:
                failures[name] = f"{type(error).__name__}: {error}"
    return Models(paths, ModelSize(**figures), failures)


def _export(source: Path, target: Path, weight_format: str) -> None:
    if target.is_dir():
        return
    venvs.install(venvs.CONVERTER)
    program = venvs.python_of(venvs.CONVERTER.name).parent / "optimum-cli"
    scratch = target.with_name(f"{target.name}.part")
    shutil.rmtree(scratch, ignore_errors=True)
    task = ["--task", "text-generation-with-past", "--weight-format", weight_format]
    run_to_end([str(program), "export", "openvino", "--model", str(source), *task, str(scratch)], 600)
    scratch.rename(target)
