"""Folders that are made once and then kept: compiled kernels, converted checkpoints and tokenizers."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

_CHUNK_BYTES = 1 << 22


def cache_root() -> Path:
    """Return ``$CONCH_CACHE``, else ``$XDG_CACHE_HOME/conch``, else ``~/.cache/conch``."""
    own = os.environ.get("CONCH_CACHE")
    if own:
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "conch"


def cached_folder(key: str, build: Callable[[Path], None]) -> Path:
    """Return the folder `key` of the cache; where it is missing, `build` fills it first.

    The folder appears whole or not at all: it is built under another name and then renamed. When two
    processes build the same folder at once, both succeed and one result is kept.
    """
    root = cache_root()
    target = root / key
    if target.is_dir():
        return target
    root.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=root, prefix=".building-"))
    try:
        build(scratch)
        scratch.chmod(0o755)
        try:
            scratch.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was first
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def digest_of_file(path: Path) -> str:
    """Hash a file's content, 32 hex digits; about 1 s a GB."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def digest_of_stats(paths: list[Path]) -> str:
    """Hash names, sizes and times of change of files, 32 hex digits; reads none of them."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(paths):
        stat = path.stat()
        digest.update(f"{path.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    return digest.hexdigest()
