"""What the model holds while a pass runs, and that it holds the same afterwards."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from numbers import Number
from operator import is_
from typing import Any, cast

import torch
from torch import nn

from dtype_engine.core.errors import NoForward
from dtype_engine.runtime.model.live import LiveModel, Weight
from dtype_engine.runtime.model.torch_private import slots_of
from dtype_engine.runtime.passes.model_behavior import ModelBehavior

_CONTAINERS = (list, dict, set, deque)
_OF_TORCH = frozenset(nn.Module().__dict__)


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


@contextmanager
def as_every_pass(model: LiveModel, behavior: ModelBehavior, modules: Collection[nn.Module]) -> Iterator[None]:
    """For a pass: it begins as every other does, and leaves the model as it found it. Raises NoForward as `keeping_codes` does."""
    with same_random_numbers(model.device), left_as_found(behavior, modules), keeping_codes(model), uncompiled():
        yield


def uncompiled() -> AbstractContextManager[None]:
    """For a pass: what `torch.compile` made runs as it was written. Compiled code calls no modules, and sees no mode."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()  # nothing is compiled, and to import it takes a second
    return cast(AbstractContextManager[None], torch.compiler.set_stance("force_eager"))


@contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    """For a pass: it draws the random numbers that every other draws, and leaves the generators as it found them."""
    on_cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_cuda else []):
        # Not torch.manual_seed: where CUDA was not started yet, that keeps a call for each pass to be made then.
        torch.default_generator.manual_seed(0)
        if on_cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(0)
        yield


@contextmanager
def left_as_found(behavior: ModelBehavior, modules: Collection[nn.Module]) -> Iterator[None]:
    """For a pass: where a module has another tensor than before as a parameter, a buffer or an attribute, it gets back what it had,
    and the numbers that it keeps with it; so it does where it has another number, or other things in a list, a dict or a set. So
    every pass begins with the same, and a cast reaches the tensor that it casts. Such a model is `stateful` from then on.

    What is gone, and what is new as a parameter or a buffer, stays so: packed weights are unpacked once.
    """
    found = [(module, [*map(dict, _kept_by(module))]) for module in modules]
    contents = [(container, copy(container)) for module in modules for container in _containers_of(module)]
    try:
        yield
    finally:
        for module, before in found:
            behavior.stateful |= _put_back(module, before)
        for container, had in contents:
            if not _has_same(container, had):
                _refill(container, had)
                behavior.stateful = True


def _kept_by(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return module.__dict__, *slots_of(module)


def _put_back(module: nn.Module, found: list[dict[str, Any]]) -> bool:
    """Put attributes, parameters and buffers back if a tensor was among what changed of them, else numbers, and tell whether
    anything was.
    """
    changes = [
        (kept, before, [name for name in kept if kept[name] is not before.get(name)])
        for kept, before in zip(_kept_by(module), found, strict=True)
    ]
    for kept, before, names in changes[1:]:
        names[:] = [name for name in names if before.get(name) is not None and kept[name] is not None]
    pairs = [(kept[name], before.get(name)) for kept, before, names in changes for name in names]
    if not any(_has_tensor(value) for pair in pairs for value in pair):
        for kept, before, names in changes:
            names[:] = [name for name in names if _is_number(kept[name]) and _is_number(before.get(name))]
    for kept, before, names in changes:
        for name in names:
            if name in before:
                kept[name] = before[name]
            elif not isinstance(kept[name], bool):  # that something was done once
                del kept[name]
    return any(names for _, _, names in changes)


def _has_tensor(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_has_tensor, value))
    return isinstance(value, torch.Tensor)


def _is_number(value: Any) -> bool:
    return isinstance(value, Number) and not isinstance(value, bool)


def _containers_of(module: nn.Module) -> list[Any]:
    """Lists, dicts and sets among a module's own attributes, torch's left out."""
    return [value for name, value in module.__dict__.items() if type(value) in _CONTAINERS and name not in _OF_TORCH]


def _has_same(container: Any, had: Any) -> bool:
    """Whether the very same objects are in it: tensors have no equality of two."""
    if isinstance(container, set):
        return bool(container == had)
    same = len(container) == len(had) and all(map(is_, container, had))
    return same and (not isinstance(container, dict) or all(map(is_, container.values(), had.values())))


def _refill(container: Any, had: Any) -> None:
    container.clear()
    (container.extend if isinstance(container, (list, deque)) else container.update)(had)
