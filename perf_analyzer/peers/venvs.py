"""A venv for each peer, made once from PyPI and kept."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from peers.engines import OURS, PEERS, Peer
from peers.process import run_to_end

_STAMP = "installed.json"
_SHOWN = ("torch", "transformers", "openvino", "nncf", "numpy")
CONVERTER = Peer(
    "openvino-convert",
    ("torch==2.13.0", "optimum-intel[openvino]==2.2.0", "openvino-tokenizers==2026.4.1.0"),
    unwanted=("torchvision",),
)


def cache_root() -> Path:
    """Return where venvs and models of the peers are kept: beside what the engine itself keeps."""
    own = os.environ.get("CONCH_CACHE")
    shared = os.environ.get("XDG_CACHE_HOME")
    root = Path(own) if own else (Path(shared) if shared else Path.home() / ".cache") / "conch"
    return root / "peers"


def python_of(name: str) -> Path:
    """Return the interpreter of a peer, which need not be installed yet."""
    if name == OURS:
        return Path(sys.executable)
    return folder_of(_peer(name)) / "bin" / "python"


def versions_of(name: str) -> dict[str, str]:
    """Return the versions that matter of an installed peer; our own are elsewhere in the record."""
    if name == OURS:
        return {}
    peer = _peer(name)
    installed: dict[str, str] = json.loads((folder_of(peer) / _STAMP).read_text())
    names = {_normal(re.split(r"[\[=<>]", text)[0]) for text in peer.requirements} | set(_SHOWN)
    return {package: version for package, version in installed.items() if package in names}


def folder_of(peer: Peer) -> Path:
    """Return the venv's folder; other requirements make another venv."""
    key = json.dumps(
        [peer.requirements, peer.unwanted, sorted(peer.environment.items()), sys.version_info[:2]]
    )
    return cache_root() / f"{peer.name}-{hashlib.blake2b(key.encode(), digest_size=4).hexdigest()}"


def install(peer: Peer) -> None:
    """Make the venv if it is not there.

    Raises
    ------
    ProgramError
        pip failed or was too slow; the message ends with what it printed.
    """
    folder = folder_of(peer)
    if (folder / _STAMP).is_file():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    run_to_end([sys.executable, "-m", "venv", str(folder)], timeout_s=120)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    variables = {**os.environ, **peer.environment}
    run_to_end([*pip, "install", *peer.requirements], timeout_s=peer.timeout_s, environment=variables)
    if peer.unwanted:
        run_to_end([*pip, "uninstall", "-y", *peer.unwanted], timeout_s=120)
    listed = subprocess.run([*pip, "list", "--format=json"], capture_output=True, check=True, timeout=120)
    found = {_normal(entry["name"]): entry["version"] for entry in json.loads(listed.stdout)}
    (folder / _STAMP).write_text(json.dumps(found, indent=1))


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _peer(name: str) -> Peer:
    return next(peer for peer in (*PEERS, CONVERTER) if peer.name == name)
