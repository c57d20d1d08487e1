"""Memory bandwidths of devices, and the least time in which one of them can decode a token.

A token needs each byte of the weights that it uses once, so the time is at least their bytes divided by the bandwidth of the
memory: the memory bound of the roofline model (S. Williams, A. Waterman and D. Patterson, "Roofline: An Insightful Visual
Performance Model for Multicore Architectures", Communications of the ACM 52, 2009).
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Device:
    """A device and the peak bandwidth of its memory, as its maker states it."""

    name: str
    gigabytes_per_s: float
    """In units of 10^9 bytes."""
    source: str
    """The maker's page or paper that states it."""


_NVIDIA, _APPLE = "https://www.nvidia.com/en-us", "https://www.apple.com"
DEVICES = {
    device.name: device
    for device in (
        Device("h200", 4800, f"{_NVIDIA}/data-center/h200/"),
        Device("h100-sxm", 3350, f"{_NVIDIA}/data-center/h100/"),
        Device("a100-80gb-sxm", 2039, f"{_NVIDIA}/data-center/a100/"),
        Device("l40s", 864, f"{_NVIDIA}/data-center/l40s/"),
        Device("rtx-5090", 1792, "NVIDIA RTX Blackwell GPU Architecture, white paper"),
        Device("rtx-4090", 1008, "NVIDIA Ada GPU Architecture, white paper"),
        Device("mi300x", 5300, "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html"),
        Device("m3-ultra", 819, f"{_APPLE}/mac-studio/specs/"),
        Device("m4-max", 546, f"{_APPLE}/macbook-pro/specs/"),
        Device("m4-pro", 273, f"{_APPLE}/macbook-pro/specs/"),
        Device("m4", 120, f"{_APPLE}/macbook-pro/specs/"),
    )
}
"""The devices whose names may stand for a bandwidth."""


def device_named(text: str) -> Device | None:
    """Return the device with a name, whatever its case and the marks between its parts, or None if there is none."""
    return {_plain(name): device for name, device in DEVICES.items()}.get(_plain(text))


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()


def milliseconds(nbytes: int, bandwidth: float) -> float:
    """Return the least number of milliseconds in which `nbytes` are read at a bandwidth in bytes per second."""
    return 1000 * nbytes / bandwidth
