"""Devices to plan for, with the source of every number."""

from __future__ import annotations

from dataclasses import dataclass

from trace_serve.errors import ConfigError


@dataclass(frozen=True)
class Device:
    """One GPU.

    Attributes:
        name: as it is chosen.
        memory_gb: device memory in GB (10^9 bytes).
        bandwidth_gb_s: memory bandwidth.
        fp4_products: whether it multiplies in FP4; otherwise NVFP4 saves memory and traffic, and products are BF16.
        source: where the numbers come from.
    """

    name: str
    memory_gb: float
    bandwidth_gb_s: float
    fp4_products: bool
    source: str


DEVICES = {
    device.name: device
    for device in (
        Device("gb200", 186.0, 8000.0, True, "NVIDIA GB200 NVL72 data sheet: 13.4 TB and 576 TB/s over 72 GPUs"),
        Device("b200", 180.0, 8000.0, True, "NVIDIA DGX B200 data sheet: 1,440 GB and 64 TB/s over 8 GPUs"),
        Device("h200", 141.0, 4800.0, False, "NVIDIA H200 data sheet: 141 GB and 4.8 TB/s"),
    )
}


def device_named(name: str) -> Device:
    """The device of that name, in any case.

    Raises:
        ConfigError: there is none.
    """
    found = DEVICES.get(name.lower())
    if found is None:
        raise ConfigError(f"--hardware: got {name!r}, expected one of {', '.join(DEVICES)}", field="hardware")
    return found
