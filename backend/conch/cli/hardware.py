"""Machines to predict for: what their vendors say, and how much of it we take for granted."""

from __future__ import annotations

import re
from dataclasses import dataclass

from conch.api.errors import ConfigError

_COUNTED = re.compile(r"(\d+)x(.+)")


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU, by its data sheet.

    Attributes
    ----------
    memory_bytes
        HBM.
    bandwidth
        Bytes a second from HBM.
    operations
        A second, of dense bf16 matrix products.
    link
        Bytes a second to other devices of the machine, each way.
    """

    memory_bytes: float
    bandwidth: float
    operations: float
    link: float


DEVICES = {
    "A100": Device(80e9, 2.039e12, 312e12, 300e9),
    "H100": Device(80e9, 3.35e12, 989e12, 450e9),
    "H200": Device(141e9, 4.8e12, 989e12, 450e9),
}
"""SXM, 80 GB of the first two; NVLink's figure is the sum of both ways, so half of it is each way."""


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What is taken for granted besides data sheets.

    Attributes
    ----------
    of_bandwidth, of_operations, of_link
        Share of the data sheet's figure that is reached.
    collective_s
        What each collective takes however little it carries.
    of_memory
        Share of a device's memory for weights and KV.
    """

    of_bandwidth: float = 0.8
    of_operations: float = 0.7
    of_link: float = 0.8
    collective_s: float = 10e-6
    of_memory: float = 0.9


ASSUMED = Assumptions()


@dataclass(frozen=True, slots=True)
class Machine:
    """Some devices, all joined with all others."""

    name: str
    count: int
    device: Device

    @classmethod
    def parse(cls, text: str) -> Machine:
        """Read ``8xH200``.

        Raises
        ------
        ConfigError
            It is not like that, or there is no such device.
        """
        found = _COUNTED.fullmatch(text)
        if found is None or found[2] not in DEVICES or int(found[1]) < 1:
            raise ConfigError(
                f"--hardware must be devices of one kind, such as 8xH200, not {text!r}; known: "
                + ", ".join(DEVICES)
            )
        return cls(text, int(found[1]), DEVICES[found[2]])

    def describe(self, assumed: Assumptions) -> str:
        """Return a sentence of what is assumed."""
        one = self.device
        return (
            f"{self.name}: each {one.memory_bytes / 1e9:.0f} GB at {one.bandwidth / 1e12:.3g} TB/s "
            f"({assumed.of_bandwidth:.0%} reached), {one.operations / 1e12:.0f} TFLOP/s dense in 16 bits "
            f"({assumed.of_operations:.0%}), links of {one.link / 1e9:.0f} GB/s each way "
            f"({assumed.of_link:.0%}); {assumed.collective_s * 1e6:.0f} us a collective besides; "
            f"{assumed.of_memory:.0%} of memory for weights and KV"
        )
