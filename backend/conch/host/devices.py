"""GPUs, as the parameter `gpu_device_ids` of a config.pbtxt names them for each instance of a model.

``"0,1;2,3"`` gives the first of two instances the devices 0 and 1. They are counted as CUDA counts them in
Triton's process: where that sees only some of a machine's devices, the first of those is 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from conch.api.config import EngineConfig
from conch.api.errors import ConfigError
from conch.api.mesh_config import shape_of

PARAMETER = "gpu_device_ids"
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


def parse_device_groups(text: str) -> list[tuple[int, ...]]:
    """Split ``0,1;2,3`` into the devices of each instance.

    Raises
    ------
    ConfigError
        It is not like that, or names a device twice for one instance.
    """
    groups = [group.split(",") for group in text.split(";")]
    if not all(number.strip().isdecimal() for group in groups for number in group):
        raise ConfigError(f"{PARAMETER} must be device numbers by instance, like '0,1;2,3', not {text!r}")
    numbers = [tuple(int(number) for number in group) for group in groups]
    if any(len(set(group)) < len(group) for group in numbers):
        raise ConfigError(f"{PARAMETER} {text!r} names a device twice for one instance")
    return numbers


def format_device_groups(groups: Sequence[Sequence[int]]) -> str:
    """Return what `parse_device_groups` reads."""
    return ";".join(",".join(map(str, group)) for group in groups)


def divide_devices(devices: Sequence[int], config: EngineConfig) -> list[tuple[int, ...]]:
    """Return the devices of each replica of an instance: one for each of its ranks, in their order.

    Raises
    ------
    ConfigError
        There are not as many as that, or the engine is to run on something else.
    """
    if config.device not in ("auto", "cuda"):
        raise ConfigError(f"{PARAMETER} is of no use with device {config.device!r}")
    replicas = config.data_parallel_size
    ranks = shape_of(config).size
    if len(devices) != replicas * ranks:
        raise ConfigError(
            f"{PARAMETER} gives an instance {counted(len(devices), 'device')}, but each rank takes one: "
            f"{counted(replicas, 'replica')} of {counted(ranks, 'rank')} take {replicas * ranks}"
        )
    return [tuple(devices[first : first + ranks]) for first in range(0, len(devices), ranks)]


def environment_for(devices: Sequence[int], around: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that show an engine its devices, and no others.

    Parameters
    ----------
    around
        Environment of the process that the devices are counted in.

    Raises
    ------
    ConfigError
        That process does not see so many.
    """
    seen = around.get(VISIBLE_DEVICES)
    if seen is None:
        return {VISIBLE_DEVICES: ",".join(map(str, devices))}
    names = [name.strip() for name in seen.split(",") if name.strip()]
    if max(devices) >= len(names):
        raise ConfigError(
            f"{PARAMETER} names device {max(devices)}, but {VISIBLE_DEVICES} {seen!r} shows "
            f"{counted(len(names), 'device')}"
        )
    return {VISIBLE_DEVICES: ",".join(names[number] for number in devices)}


def counted(number: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{number} {noun}" + "s" * (number != 1)
