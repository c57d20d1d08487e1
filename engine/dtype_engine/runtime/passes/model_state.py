"""What the model holds while a pass runs, and that it holds the same afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dtype_engine.core.errors import NoForward
from dtype_engine.runtime.model.live import LiveModel, Weight


@contextmanager
def stored_values(model: LiveModel) -> Iterator[None]:
    """The stored data in place of the cast one, for a while. Only pointers move."""
    changed = [weight for weight in model.weights.values() if weight.changed]
    try:
        for weight in changed:
            weight.stashed = weight.tensor.data
            weight.tensor.data = weight.original.to(model.device)
        yield
    finally:
        for weight in changed:
            if weight.stashed is not None:
                weight.tensor.data, weight.stashed = weight.stashed, None


@contextmanager
def keeping_codes(model: LiveModel) -> Iterator[None]:
    """For a pass: a model that converts a module itself (`child.to(torch.float32)`) puts values in the place of a storage-only
    weight's codes. These are put back, and NoForward is raised.
    """
    before = [(weight, weight.tensor.data) for weight in model.weights.values() if weight.scale is not None]
    converted: list[Weight] = []
    try:
        yield
    finally:
        for weight, codes in before:
            if weight.tensor.dtype != codes.dtype:
                converted.append(weight)
                weight.tensor.data = codes
    if converted:
        raise NoForward(
            f"the model converts {converted[0].info.name} itself while it runs, so it can't be measured in {converted[0].dtype}; "
            "leave it in float32, float16 or bfloat16"
        )
