"""From the `model` of a configuration to a folder in Hugging Face layout."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from conch.api import CheckpointError, EngineConfig
from conch.api.model_reference import DEMO_SCHEME, resolve_model_reference
from conch_kernels.cache import cached_folder, digest_of_file, digest_of_stats

Progress = Callable[[str, float], None]

_GGUF_FORMAT = 1
"""Part of the cache key: grows when a conversion of the same file gives another result."""

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def resolve_checkpoint(config: EngineConfig, progress: Progress) -> Path:
    """Return a folder with config.json, safetensors and tokenizer.json; nothing is ever downloaded.

    A folder that has all of them is used as it is. What is missing is made once, in the cache: a GGUF file
    is converted whole; for a folder without tokenizer.json a twin is made that links to its files;
    ``demo:FAMILY`` is drawn.

    Raises
    ------
    CheckpointError
        The path does not exist, or is not a checkpoint that can be served.
    """
    reference = resolve_model_reference(config.model)
    if reference.startswith(DEMO_SCHEME):
        from conch.model.demo import demo_checkpoint

        return demo_checkpoint(reference)
    path = Path(reference).expanduser()
    if path.is_file() and path.suffix.lower() == ".gguf":
        return _converted(path, progress)
    if not path.is_dir():
        raise CheckpointError(
            f"model {config.model!r} is neither a folder in Hugging Face layout nor a .gguf file; "
            "conch never downloads models, so give the path of one on this machine"
        )
    path = path.resolve()
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path} has no config.json: not a checkpoint in Hugging Face layout")
    weight_files(path)
    return path if (path / "tokenizer.json").is_file() else _with_tokenizer(path, config.trust_remote_code)


def weight_files(folder: Path) -> list[Path]:
    """List the safetensors files of a checkpoint, each once.

    Raises
    ------
    CheckpointError
        There are none, or the index cannot be read or names one that is missing.
    """
    index = folder / _INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{index} is not an index of weights: {type(error).__name__}: {error}"
            ) from error
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(f"{folder} lacks {', '.join(missing)}, which {_INDEX} names")
        return [folder / name for name in names]
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} has no *.safetensors file; other weight formats are not read")
    return files


def open_weights(folder: Path, stack: ExitStack) -> Iterator[Any]:
    """Open the safetensors files of a checkpoint, one after the other; `stack` closes them.

    Raises
    ------
    CheckpointError
        There are none, or one cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    for path in weight_files(folder):
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
        yield file


def _converted(path: Path, progress: Progress) -> Path:
    from conch.model.gguf import convert_gguf

    key = f"gguf{_GGUF_FORMAT}-{path.stem}-{digest_of_file(path)}"
    return cached_folder(key, lambda folder: convert_gguf(path.resolve(), folder, progress))


def _with_tokenizer(source: Path, trust_remote_code: bool) -> Path:
    files = [path for path in source.iterdir() if path.is_file()]

    def build(folder: Path) -> None:
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(
                source, local_files_only=True, trust_remote_code=trust_remote_code
            )
            tokenizer.save_pretrained(folder)
        except Exception as error:  # each tokenizer fails in its own way
            raise CheckpointError(f"cannot load the tokenizer of {source}: {error}") from error
        if not (folder / "tokenizer.json").is_file():
            raise CheckpointError(
                f"the tokenizer of {source} ({type(tokenizer).__name__}) cannot be written as tokenizer.json"
            )
        for path in files:
            if not (folder / path.name).exists():
                (folder / path.name).symlink_to(path)

    return cached_folder(f"tokenizer-{source.name}-{digest_of_stats(files)}", build)
