"""Models in a Triton model repository: writing them, and reading what is there."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from conch.api.config import EngineConfig, load_config, parse_config
from conch.api.errors import ConfigError
from conch.host.devices import PARAMETER, divide_devices, format_device_groups

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_IS_CONCH = re.compile(r"""^\s*backend\s*:\s*["']conch["']""", re.MULTILINE)


@dataclass(frozen=True)
class ModelEntry:
    """One model as a repository shows it.

    Attributes
    ----------
    name
        What clients call it.
    settings
        Content of `model.json`; validated here.
    instances
        Engines that serve it, each with a copy of the weights; Triton spreads requests over them.
    devices
        GPUs of each instance; empty to say nothing of them.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    instances: int = 1
    devices: Sequence[tuple[int, ...]] = ()

    def __post_init__(self) -> None:
        """Refuse what Triton would refuse later and less clearly."""
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"model name {self.name!r} may hold only letters, digits, '.', '_' and '-'")
        if self.instances < 1:
            raise ConfigError(f"instances must be 1 or more, not {self.instances}")
        config = parse_config(self.settings)
        for group in self.devices:
            divide_devices(group, config)
        if self.devices:
            parse_config({**self.settings, "device": "cuda"})  # as engines with devices are told

    def config_pbtxt(self) -> str:
        """Return the `config.pbtxt`; conch adds tensors and transaction policy when Triton loads it."""
        lines = ['backend: "conch"', f"instance_group [{{ count: {self.instances} kind: KIND_MODEL }}]"]
        if self.devices:
            value = f'value: {{ string_value: "{format_device_groups(self.devices)}" }}'
            lines.append(f'parameters {{ key: "{PARAMETER}" {value} }}')
        return "".join(f"{line}\n" for line in lines)

    def model_json(self) -> str:
        """Return the `model.json`."""
        return msgspec.json.format(msgspec.json.encode(dict(self.settings)), indent=2).decode() + "\n"


def write_model(repository: Path, entry: ModelEntry) -> list[Path]:
    """Write a model into a repository, which is made where needed, and return the files written.

    Raises
    ------
    ConfigError
        The repository already has something of that name.
    """
    folder = repository / entry.name
    if folder.exists():
        raise ConfigError(f"{folder} exists already; remove it or choose another name")
    version = folder / "1"
    version.mkdir(parents=True)
    texts = {folder / "config.pbtxt": entry.config_pbtxt(), version / "model.json": entry.model_json()}
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return list(texts)


def find_configs(
    repositories: Iterable[Path], overrides: Mapping[str, Any]
) -> Iterator[tuple[str, EngineConfig]]:
    """Read and validate each `model.json` of the conch models in these repositories.

    Raises
    ------
    ConfigError
        One of them would not load; the message names its file.
    """
    for repository in repositories:
        for pbtxt in sorted(repository.glob("*/config.pbtxt")):
            if _IS_CONCH.search(pbtxt.read_text(encoding="utf-8")):
                for path in sorted(pbtxt.parent.glob("*/model.json")):
                    yield pbtxt.parent.name, load_config(path, overrides)
