"""GGUF to Hugging Face layout: weights, config, tokenizer, chat template and generation config."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from conch.api import CheckpointError
from conch.model.gguf_config import config_of
from conch.model.gguf_file import GgufFile
from conch.model.gguf_weights import GgufWeights

Metadata = Mapping[str, Any]
Progress = Callable[[float], None]
_CONTROL_TOKEN = 3

_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|end_of_turn|>", "<|eom_id|>")
"""Control tokens that end an answer wherever a vocabulary has them."""

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {
    "llama-bpe": rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}{_REST}",
    "qwen2": rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{_REST}",
}
_DIGIT_SPLITTERS = ("smollm", "starcoder", "refact", "command-r")


def convert_gguf(path: Path, folder: Path, progress: Any) -> None:  # noqa: ANN401 - Callable[[str, float], None]
    """Write the checkpoint in `path` to `folder`, dequantised to fp32 safetensors.

    The config states bfloat16, so that a dtype of ``auto`` serves in that; the stored values are exact, so
    that ``float32`` serves what the file says.

    Raises
    ------
    CheckpointError
        The file cannot be read, or the packages that read it are missing.
    """
    stage = f"converting {path.name}"
    progress(stage, 0.0)
    file = open_gguf(path)
    metadata = file.metadata
    _convert_tokenizer(path, folder, metadata)
    progress(stage, 0.2)
    config = _convert_weights(file, folder, lambda done: progress(stage, 0.2 + 0.7 * done))
    progress(stage, 0.9)
    eos = sorted(eos_token_ids(metadata))
    config["dtype"] = "bfloat16"
    config["eos_token_id"] = eos[0] if len(eos) == 1 else eos or None
    _write_json(folder / "config.json", config)
    generation = {"eos_token_id": config["eos_token_id"]}
    for ours, theirs in (("bos_token_id", "bos"), ("pad_token_id", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        if token_id is not None:
            generation[ours] = int(token_id)
    _write_json(folder / "generation_config.json", generation)
    progress(stage, 1.0)


def open_gguf(path: Path) -> GgufFile:
    """Read the header of a GGUF file, if the package that reads its tensors is there."""
    _require("gguf", path)
    return GgufFile(path)


def _require(package: str, path: Path) -> None:
    try:
        import_module(package)
    except ImportError as error:
        raise CheckpointError(
            f"reading {path.name} needs the package {error.name!r}: pip install 'conch[gguf]', "
            "or pip install gguf accelerate"
        ) from error


def eos_token_ids(metadata: Metadata) -> set[int]:
    """Every id that ends an answer: those the metadata names, and control tokens known to end a turn."""
    named = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    ids = {int(token_id) for token_id in named if token_id is not None}
    control = _control_tokens(metadata)
    return ids | {control[token] for token in _TURN_ENDS if token in control}


def _control_tokens(metadata: Metadata) -> dict[str, int]:
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    types = metadata.get("tokenizer.ggml.token_type", ())
    pairs = enumerate(zip(tokens, types, strict=False))
    return {token: index for index, (token, kind) in pairs if kind == _CONTROL_TOKEN}


def _convert_weights(file: GgufFile, folder: Path, progress: Progress) -> dict[str, Any]:
    """Write model.safetensors; returns the config, which does not speak of quantisation."""
    from safetensors.torch import save_file

    try:
        stored = GgufWeights(file)
    except CheckpointError:  # an architecture that needs more than new names
        weights, config = _through_transformers(file.path)
    else:
        weights, config = {}, config_of(file)
        for index, name in enumerate(stored.names()):
            weights[name] = stored.dense(name)
            progress(index / len(stored.names()))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return config


def _through_transformers(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load the whole model; returns its weights and its config."""
    import torch
    from transformers import AutoModelForCausalLM

    _require("accelerate", path)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            dtype=torch.float32,
            local_files_only=True,
            **_dequantize(),
        )
    except Exception as error:  # each architecture fails in its own way
        raise CheckpointError(f"transformers cannot read {path.name}: {error}") from error
    weights = {}
    storages = set()
    for name, weight in model.state_dict().items():
        if weight.data_ptr() not in storages:  # tied weights are stored once, under their first name
            storages.add(weight.data_ptr())
            weights[name] = weight.contiguous()
    config: dict[str, Any] = model.config.to_dict()
    config.pop("quantization_config", None)
    config["architectures"] = [type(model).__name__]
    return weights, config


def _dequantize() -> dict[str, Any]:
    """Ask for plain weights; transformers from 5.2x on keeps them packed unless told."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _convert_tokenizer(path: Path, folder: Path, metadata: Metadata) -> None:
    from tokenizers import AddedToken
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # For llama AutoTokenizer ends in the class below, but reads the whole metadata on its way there.
    plain = metadata.get("general.architecture") == "llama"
    kind = PreTrainedTokenizerFast if plain else AutoTokenizer
    try:
        tokenizer = kind.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    except Exception as error:
        raise CheckpointError(f"transformers cannot read the tokenizer of {path.name}: {error}") from error
    backend = tokenizer.backend_tokenizer
    special = [AddedToken(token, special=True, normalized=False) for token in _control_tokens(metadata)]
    backend.add_special_tokens(special)
    splitter = _pre_tokenizer(metadata)
    if splitter is not None:
        backend.pre_tokenizer = splitter
    _set_bos(tokenizer, metadata)
    tokenizer.chat_template = metadata.get("tokenizer.chat_template")
    tokenizer.save_pretrained(folder)


def _pre_tokenizer(metadata: Metadata) -> Any:  # noqa: ANN401 - tokenizers is not typed
    """Split text as the file says; None leaves what transformers chose for the architecture."""
    from tokenizers import Regex, pre_tokenizers

    kind = metadata.get("tokenizer.ggml.pre")
    if metadata.get("tokenizer.ggml.model") != "gpt2":
        return None
    if kind in _DIGIT_SPLITTERS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if kind in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[kind]), "isolated")
        whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([split, whole])
    return None


def _set_bos(tokenizer: Any, metadata: Metadata) -> None:  # noqa: ANN401 - transformers is not typed
    """Make encoding begin with BOS exactly where the metadata says so."""
    from tokenizers.processors import TemplateProcessing

    add_bos = metadata.get("tokenizer.ggml.add_bos_token")
    bos_id = metadata.get("tokenizer.ggml.bos_token_id")
    if add_bos is None or bos_id is None:
        return
    begins = tokenizer("a").input_ids[:1] == [int(bos_id)]
    if begins == bool(add_bos):
        return
    bos = tokenizer.convert_ids_to_tokens(int(bos_id))
    prefix = f"{bos} " if add_bos else ""
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{prefix}$A", pair=f"{prefix}$A $B:1", special_tokens=[(bos, int(bos_id))]
    )


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
