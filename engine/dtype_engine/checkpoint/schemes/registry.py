"""Finds the schemes, which are the modules of this package that have a `SCHEME`, and applies them to a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any

from msgspec.structs import replace

from dtype_engine.checkpoint import schemes as package
from dtype_engine.checkpoint.safetensors_header import CheckpointTensor
from dtype_engine.checkpoint.schemes.configuration import declared
from dtype_engine.checkpoint.schemes.layout import Layout
from dtype_engine.checkpoint.schemes.scheme import CodedWeight, Scheme
from dtype_engine.core.dtypes import PER_TENSOR
from dtype_engine.core.errors import TooSlow, UserError
from dtype_engine.core.gc_pause import gc_paused
from dtype_engine.core.regexes import time_limit

_MATCHING_S = 10.0
"""Limit on the seconds in which the patterns of settings are matched with the names of all modules."""


@cache
def schemes() -> tuple[Scheme, ...]:
    """Return all schemes, ordered by `Scheme.rank`."""
    files = {file for folder in package.__path__ for file in os.listdir(folder)}  # pkgutil would take 2 ms
    names = sorted(file.removesuffix(".py") for file in files if file.endswith(".py") and file != "__init__.py")
    modules = (import_module(f"{package.__name__}.{name}") for name in names)
    found: list[Scheme] = [module.SCHEME for module in modules if hasattr(module, "SCHEME")]
    return tuple(sorted(found, key=lambda scheme: scheme.rank))


@cache
def layouts() -> tuple[Layout, ...]:
    """Return the layouts of all schemes in the order in which they are tried: first the layouts that have a `mark`."""
    found = (layout for scheme in schemes() for layout in scheme.layouts)
    return tuple(sorted(found, key=lambda layout: not layout.mark))


def read_coded(
    tensors: Mapping[str, CheckpointTensor], config: Mapping[str, Any] | None, metadata: Mapping[str, str]
) -> dict[str, CodedWeight]:
    """Return the weights that other programs quantized, by name. Raises UserError if a small tensor can't be read."""
    found: dict[str, CodedWeight] = {}
    try:
        with gc_paused(), time_limit(_MATCHING_S):
            for scheme in schemes():
                read = scheme.read(tensors, config or {}, metadata)
                if own := {weight.name: weight for weight in read if weight is not None}:
                    found = _with_beside(own, tensors, scheme.beside) | found
    except TooSlow as error:
        raise UserError(f"config.json: {error}") from None
    return found


def _with_beside(
    weights: dict[str, CodedWeight], tensors: Mapping[str, CheckpointTensor], ends: tuple[str, ...]
) -> dict[str, CodedWeight]:
    """Return the weights, with `beside` extended by the other tensors of their modules whose names end in one of `ends`."""
    beside: dict[str, tuple[CheckpointTensor, ...]] = {}
    for name, tensor in tensors.items():
        if name.endswith(ends):
            module = name.rpartition(".")[0]
            beside[module] = (*beside.get(module, ()), tensor)
    for name, weight in weights.items() if beside else ():
        if more := beside.get(name.rpartition(".")[0]):
            weights[name] = replace(weight, beside=(*weight.beside, *more))
    return weights


def input_format(weight: CodedWeight, config: Mapping[str, Any] | None) -> str:
    """Return the format of `core.dtypes`, such as "int8", to which runtimes round the inputs of a weight's layer, or "". If the
    format ends with "@tensor", `weight.input_scale` is the scale of all inputs. config: the content of config.json.
    """
    found = weight.scheme.input_format(weight, declared(config or {}))
    return "" if found.endswith(PER_TENSOR) and weight.input_scale is None else found
