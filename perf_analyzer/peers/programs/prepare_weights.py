"""The same weights in the formats that the engines read. Options: ``{"model", "folder"}``.

Makes ``bf16/`` (Hugging Face layout), ``bf16.gguf`` and ``size.json``, the figures of `limits.ModelSize`,
and answers any question with the path of the file as it is stored.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import gguf
import torch
from lines import serve
from safetensors.torch import load_file, save_file

from conch.api.config import EngineConfig
from conch.api.model_reference import resolve_model_reference
from conch.model.checkpoint import resolve_checkpoint, weight_files


def write_bf16(source: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Copy a checkpoint with its weights as bf16 and return them."""
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.suffix != ".safetensors" and path.is_file() and "index" not in path.name:
            shutil.copy(path, folder)
    weights = {
        name: tensor.to(torch.bfloat16).contiguous()
        for path in weight_files(source)
        for name, tensor in load_file(path).items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config.pop("dtype", None)
    config["torch_dtype"] = "bfloat16"  # the older name of the key, which all readers know
    config.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return weights


def write_gguf(source: Path, target: Path) -> None:
    """Copy a GGUF file with its matrices as bf16; vectors become fp32, as llama.cpp's converter has them."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def model_size(weights: dict[str, torch.Tensor], config: dict[str, Any], stored: Path) -> dict[str, Any]:
    """Return the figures of `limits.ModelSize`."""
    matrices = {name: tensor.numel() for name, tensor in weights.items() if tensor.ndim == 2}
    layers = sum(size for name, size in matrices.items() if "embed" not in name and "lm_head" not in name)
    head = config["vocab_size"] * config["hidden_size"]
    heads, width = config["num_attention_heads"], config["hidden_size"]
    kv_width = config.get("num_key_value_heads", heads) * config.get("head_dim", width // heads)
    stored_bytes = sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(stored).tensors)
    return {
        "linear_parameters": layers,
        "head_parameters": head,
        "weight_bytes": {"16bit": 2 * (layers + head), "int8": layers + head, "4bit": stored_bytes},
        "kv_bytes_per_token": 2 * 2 * kv_width * config["num_hidden_layers"],
        "attention_width": heads * config.get("head_dim", width // heads) * config["num_hidden_layers"],
        "parameters": sum(math.prod(tensor.shape) for tensor in weights.values()),
    }


def start(options: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Make what is missing."""
    folder = Path(options["folder"])
    stored = Path(resolve_model_reference(options["model"])).resolve()
    if not (folder / "size.json").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        converted = resolve_checkpoint(EngineConfig(model=str(stored)), lambda stage, fraction: None)
        weights = write_bf16(converted, folder / "bf16")
        write_gguf(stored, folder / "bf16.gguf")
        config = json.loads((folder / "bf16" / "config.json").read_text())
        size = model_size(weights, config, stored)
        (folder / "size.json").write_text(json.dumps(size, indent=1))
    return {"stored": str(stored)}, lambda question: {}


if __name__ == "__main__":
    serve(start)
