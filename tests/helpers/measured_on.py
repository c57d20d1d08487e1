"""The device on which the tests measure: what `DTYPE_TUI_TEST_DEVICE` names, which is the CPU if it is not set.

`fake` is the accelerator of `fake_accelerator.py`, and `fake+float64` the same with float64, as CUDA has it. Every other name is a
device of torch. A test takes the device by `Options`, whose default it becomes here, and a live module that a test opens is moved
to it. What a test compares with plain torch goes through `placed`. A test marked `cpu_only` is left out on every other device.
"""

from __future__ import annotations

import os
from typing import Any, TypeVar

import pytest

from dtype_engine import Options

WANTED = os.environ.get("DTYPE_TUI_TEST_DEVICE", "cpu")
DEVICE = WANTED.partition("+")[0]
_kept: list[Any] = []
"""What has to live as long as the process."""
T = TypeVar("T")


def use() -> None:
    """Make the device the one of every session that names none."""
    initialize: Any = Options.__init__
    initialize.__defaults__ = (DEVICE, *initialize.__defaults__[1:])
    if DEVICE == "cpu":
        return
    import torch
    from torch import nn

    from dtype_engine.runtime.session import opening

    if DEVICE == "fake":
        from tests.helpers import fake_accelerator

        _kept.append(fake_accelerator.register())
        if "+float64" in WANTED:
            fake_accelerator.device.lacks -= {torch.float64, torch.complex128}
    open_session = opening.open_session

    def moved(model: Any = None, *given: Any, **named: Any) -> Any:
        if isinstance(model, nn.Module) and not any(tensor.is_meta for tensor in model.parameters()):
            model.to(DEVICE)
        return open_session(model, *given, **named)

    opening.open_session = moved


def placed(values: T) -> T:
    """Modules, tensors and what holds them, on the device. A module is moved in place."""
    if DEVICE == "cpu":
        return values
    import torch
    from torch.utils._pytree import tree_map_only

    found: T = tree_map_only((torch.Tensor, torch.nn.Module), lambda each: each.to(DEVICE), values)
    return found


def leave_out(items: list[pytest.Item]) -> None:
    """Skip what only the CPU can run."""
    for item in items:
        marker = item.get_closest_marker("cpu_only")
        if marker is not None and DEVICE != "cpu":
            item.add_marker(pytest.mark.skip(reason=f"only on the CPU: {marker.args[0]}"))
