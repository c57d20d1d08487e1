"""The most bytes that weights may take on a device, as the user's options limit them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from dtype_engine.core.errors import NoForward
from dtype_engine.core.options import ModelOptions
from dtype_engine.core.units import human_bytes


def limit_of(device: torch.device, limits: Mapping[str, int]) -> int | None:
    """Return how many bytes weights may take on a device, or None if no limit is for it. limits: the user's limits, keyed by device
    name, such as "cpu", "cuda:0" or "cuda".
    """
    names = ("cpu",) if device.type == "cpu" else (f"{device.type}:{device.index or 0}", device.type)
    return next((limits[name] for name in names if name in limits), None)


def require_fit(module: nn.Module, title: str, device: torch.device, options: ModelOptions) -> None:
    """Raise NoForward if a module that exists in memory is larger than the options allow on the device. Such a module can't be run
    in parts. Without a limit, or if the module is distributed over several devices, there is nothing to check here.
    """
    limit = limit_of(device, options.max_memory)
    if limit is None or options.device_map:
        return
    size = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    if size > limit:
        raise NoForward(
            f"{title}: no forward pass: its weights take {human_bytes(size)} and may take {human_bytes(limit)} on {device}; a "
            "module that Python code makes can't be run in parts"
        )
