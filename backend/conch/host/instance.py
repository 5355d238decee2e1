"""Which of a model's instances this is, and which GPUs it has, as Triton's config.pbtxt says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conch.api.errors import ConfigError
from conch.host.devices import PARAMETER, counted, parse_device_groups

_NAME = re.compile(r"_(\d+)_(\d+)$")


@dataclass(frozen=True, slots=True)
class Instance:
    """One of the `count` instances that Triton runs of a model.

    Attributes
    ----------
    index
        Which.
    devices
        GPUs that are its own; None where nothing is said of them.
    """

    index: int = 0
    count: int = 1
    devices: tuple[int, ...] | None = None


def instance_of(model_config: Mapping[str, Any], name: str) -> Instance:
    """Read Triton's instance groups, and the parameter `gpu_device_ids`.

    Parameters
    ----------
    model_config
        As Triton hands it over, completed.
    name
        Of the instance, which ends with the index of its group and its own index in there.

    Raises
    ------
    ConfigError
        The devices are said wrongly, or not for this instance.
    """
    groups = model_config.get("instance_group", ())
    counts = [int(group.get("count", 1)) * max(1, len(group.get("gpus", ()))) for group in groups]
    found = _NAME.search(name)
    group, index = (int(found[1]), int(found[2])) if found else (0, 0)
    instance = Instance(sum(counts[:group]) + index, max(1, sum(counts)))
    said = model_config.get("parameters", {}).get(PARAMETER)
    if said is None:
        return instance
    if any(each.get("kind") == "KIND_GPU" for each in groups):
        raise ConfigError(f"with {PARAMETER} instance groups must be of KIND_MODEL, not KIND_GPU")
    return Instance(instance.index, instance.count, _devices_of(instance, said["string_value"]))


def _devices_of(instance: Instance, said: str) -> tuple[int, ...]:
    devices = parse_device_groups(said)
    if len(devices) != instance.count:
        raise ConfigError(
            f"{PARAMETER} {said!r} is for {counted(len(devices), 'instance')}, but the instance groups make "
            f"{instance.count}, of which this is number {instance.index}"
        )
    return devices[instance.index]
