"""Fills the non-persistent buffers, which no file holds, of a model whose Python code comes with its checkpoint.

`from_pretrained` constructs a model without data and then allocates these buffers. Only transformers' own classes are sure to
compute their values; in others, they may hold arbitrary memory (transformers issue 48892).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from dtype_engine.core.foreign_code import foreign_code
from dtype_engine.core.text import printable
from dtype_engine.runtime.building.architecture import reason
from dtype_engine.runtime.libraries.torch_private import own_tensors

_COMPLETE = ("transformers.", "torch.")
"""Prefixes of the names of Python modules whose model classes fill their own buffers on loading."""


def construct_buffers(module: nn.Module, dtype: torch.dtype) -> tuple[str, ...]:
    """Construct a loaded model again on the CPU, and replace each non-persistent buffer of `module` that differs from the
    constructed one. Nothing is done if all of the model's classes come from transformers or torch, which fill these buffers
    themselves. Returns notices about the replaced buffers, and about those that the constructor did not create.

    dtype: the default dtype with which `module` was loaded.
    """
    buffers = _non_persistent(module)
    if not buffers or all(type(part).__module__.startswith(_COMPLETE) for part in module.modules()):
        return ()
    try:
        with foreign_code(), default_dtype(dtype), parameters_without_data():
            made = _non_persistent(type(module)(copy.deepcopy(module.config)))
    except Exception as error:  # the model's own code, which may raise anything
        return (_unknown(list(buffers), f"the constructor of {type(module).__name__} failed: {reason(error)}"),)
    replaced, unknown = [], []
    for name, buffer in buffers.items():
        value = made.get(name)
        if value is None or value.is_meta or value.shape != buffer.shape:
            unknown.append(name)
        elif not _same_bits(value, buffer):
            buffer.data = value
            replaced.append(name)
    notices = []
    if replaced:
        notices.append(
            f"{_buffers(replaced)} not in the checkpoint, and from_pretrained does not fill such buffers: the values come from "
            f"the constructor of {type(module).__name__}"
        )
    if unknown:
        notices.append(_unknown(unknown, f"the constructor of {type(module).__name__} does not make them"))
    return tuple(notices)


def _unknown(names: list[str], why: str) -> str:
    return f"{_buffers(names)} not in the checkpoint, and may hold any values, because {why}"


def _buffers(names: list[str]) -> str:
    first = printable(names[0])
    return f"the buffer {first} is" if len(names) == 1 else f"{len(names)} buffers, first {first}, are"


def _non_persistent(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        f"{prefix}.{local}" if prefix else local: tensor
        for prefix, part in module.named_modules()
        for local, tensor, kind in own_tensors(part)
        if kind == "non-persistent buffer"
    }


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype:
        return False
    left, right = (each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(left, right)


@contextmanager
def parameters_without_data() -> Iterator[None]:
    """Move each parameter that is registered in the `with` block to the meta device, so that the constructor of a model needs
    memory for only one parameter at a time.
    """

    def without_data(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    with register_module_parameter_registration_hook(without_data):
        yield


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Let constructors make tensors in `dtype` if they name none, as `from_pretrained` does, while the `with` block runs."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
