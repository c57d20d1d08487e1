"""Finds and replaces tensors in arguments and results of passes: nested lists, tuples, mappings, dataclasses, packed sequences."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

Change = Callable[[torch.Tensor], torch.Tensor]


def parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, element) for each element of a mapping, dataclass, list or tuple. The name is a key, field name or index."""
    if isinstance(value, Mapping):
        yield from ((str(key), item) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        names = getattr(value, "_fields", None) or map(str, range(len(value)))
        yield from zip(names, value, strict=True)
    elif _is_dataclass(value):
        yield from ((field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value))


def named_tensors_in(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor in a nested value with its dotted path, which begins with `name`, such as "past_key_values.0.keys"."""
    if isinstance(value, torch.Tensor):
        yield name, value
    for part, item in parts_of(value):
        yield from named_tensors_in(f"{name}.{part}", item)


def with_tensors(value: Any, change: Change) -> Any:
    """Return a copy of a nested value in which `change` is applied to every tensor, except the lengths of a packed sequence, which
    torch keeps on the CPU. Objects without tensors are not copied.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, PackedSequence):
        order = [each if each is None else change(each) for each in (value.sorted_indices, value.unsorted_indices)]
        return PackedSequence(change(value.data), value.batch_sizes, *order)
    if not any(True for _ in named_tensors_in("", value)):
        return value
    if isinstance(value, (list, tuple)):
        items = [with_tensors(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    copied = copy.copy(value)
    if isinstance(copied, MutableMapping):
        for key, item in value.items():
            copied[key] = with_tensors(item, change)
    elif _is_dataclass(copied):
        for name, item in parts_of(value):
            object.__setattr__(copied, name, with_tensors(item, change))  # the class may be frozen
    return copied


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides, by which torch chooses kernels. `clone` may change the strides of a view."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_contiguous() or not tensor.numel():
        return tensor.clone()
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((span,), (1,)).clone().as_strided(tensor.shape, tensor.stride(), 0)


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
