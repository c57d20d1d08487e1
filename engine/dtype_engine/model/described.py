"""A model as other tools will see it: module classes and their bases, ties and islands, in the stored dtypes.

Mostly the architecture on the meta device and the headers of the files tell all of it. Where they do not agree (a Python
model, packed experts of several dtypes, quantised weights) the model is loaded, its weights mapped.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import nn

from .. import dtypes
from ..checkpoint import Checkpoint
from ..errors import NoForward
from ..options import Options
from ..tree import TensorInfo, Tree
from .live import inventory, tree_of
from .load import expected_module, load
from .source import Source


@dataclass(frozen=True, slots=True)
class Described:
    """A tree with classes where they are known. `kinds` has the torch classes that every module class derives from."""

    tree: Tree
    kinds: dict[str, frozenset[str]]
    model_type: str | None


def describe(source: Source, options: Options) -> Described:
    """What a model is made of. Without a known architecture it is what the files say: no classes, no ties."""
    checkpoint = source.open()
    if checkpoint is None:
        return _described(load(source, options).module, None)
    config = checkpoint.config or {}
    model_type = config.get("model_type")
    named = model_type if isinstance(model_type, str) else None
    module = expected_module(source, options)
    if module is not None:
        infos = _as_stored(inventory(module)[0], getattr(module, "base_model_prefix", "") or "", checkpoint)
        if infos is not None:
            return Described(tree_of(module, infos), _kinds(module), named)
    try:
        return _described(load(source, options).module, named)
    except NoForward:
        return Described(checkpoint.tree(), {}, named)


def _described(module: nn.Module, model_type: str | None) -> Described:
    return Described(tree_of(module), _kinds(module), model_type)


def _kinds(module: nn.Module) -> dict[str, frozenset[str]]:
    classes = {type(child) for child in module.modules()}
    return {
        found.__name__: frozenset(
            base.__name__ for base in found.__mro__[1:] if issubclass(base, nn.Module) and base is not nn.Module
        )
        for found in classes
    }


def _as_stored(infos: list[TensorInfo], prefix: str, checkpoint: Checkpoint) -> list[TensorInfo] | None:
    """With the dtypes of the files; None where those do not tell them all."""
    stored = {tensor.dtype for tensor in checkpoint.tensors.values()}
    if not stored <= {*dtypes.COMPUTED, "int64", "int32", "bool"}:
        return None
    floating = stored & set(dtypes.COMPUTED)
    only = next(iter(floating)) if len(floating) == 1 else None
    found: list[TensorInfo] = []
    for info in infos:
        if not info.castable or not info.persistent:
            found.append(info)
            continue
        spelled = (key for name in info.names for key in (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}"))
        dtype = next((checkpoint.tensors[key].dtype for key in spelled if key in checkpoint.tensors), only)
        if dtype is None:
            return None
        found.append(dataclasses.replace(info, dtype=dtype))
    return found
