"""Compares the shapes of a checkpoint's tensors with those of the module that its configuration makes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

from dtype_engine.checkpoint import Checkpoint
from dtype_engine.checkpoint.packed_weights import quantized_parts
from dtype_engine.checkpoint.schemes.configuration import declared, mapping
from dtype_engine.core import dtypes
from dtype_engine.core.errors import NoForward
from dtype_engine.core.text import printable
from dtype_engine.results.coverage import Misshapen
from dtype_engine.runtime.libraries.hf_private import turned_names
from dtype_engine.runtime.model.name_mapping import Placement

Shape = tuple[int, ...]
_INTEGERS = ("int", "uint", "bool")


def misshapen(module: nn.Module, checkpoint: Checkpoint, placements: Mapping[str, Placement]) -> tuple[Misshapen, ...]:
    """Return the tensors of a checkpoint whose shapes differ from those in the module, which may be on the meta device. Tensors of
    unknown schemes are left out, because their codes do not tell the shape of the weight.
    """
    state = module.state_dict()
    whole: dict[str, str] = {}
    parts: dict[str, list[str]] = {}
    for name, placement in placements.items():
        if placement.name not in state or not _has_shape(checkpoint, name):
            continue
        if not placement.part:
            whole[name] = placement.name
        elif placement.place is not None:
            parts.setdefault(placement.name, []).append(name)
    shapes = {name: checkpoint.weights[name].shape for name in placements if name in checkpoint.weights}
    wrong = {name: live for name, live in whole.items() if shapes[name] != tuple(state[live].shape)}
    turned = turned_names(module, wrong) if wrong else set()
    found = [
        Misshapen(name, shapes[name], tuple(state[live].shape))
        for name, live in wrong.items()
        if name not in turned or sorted(shapes[name]) != sorted(state[live].shape)
    ]
    for live, names in parts.items():
        found += _of_parts(live, state[live], {name: (placements[name], shapes[name]) for name in names})
    return tuple(found)


def integers(module: nn.Module, checkpoint: Checkpoint, placements: Mapping[str, Placement]) -> tuple[str, ...]:
    """Return the names of the tensors that hold integers or booleans in the checkpoint, but floats in the module, which may be on
    the meta device. Returns () if the checkpoint declares that it is quantized.
    """
    config = checkpoint.config or {}
    if declared(config) or mapping(config.get("quantization")):
        return ()
    state, codes = module.state_dict(), quantized_parts(checkpoint.unread, config)
    return tuple(
        name
        for name, placement in placements.items()
        if placement.name in state and state[placement.name].is_floating_point()
        if name not in checkpoint.coded and name not in codes and checkpoint.dtype(name).startswith(_INTEGERS)
        if not checkpoint.weights[name].packed
    )


def refuse_misshapen(
    module: nn.Module, checkpoint: Checkpoint, placements: Mapping[str, Placement], folder: Path
) -> None:
    """Raise NoForward if `misshapen` finds any tensors. folder: the checkpoint's folder, which the message names."""
    first, *others = misshapen(module, checkpoint, placements) or (None,)
    if first is not None:
        more = f" (and {len(others)} more, which `dtype-engine check` lists)" if others else ""
        raise NoForward(
            f"{folder}: config.json makes {printable(first.name)} {list(first.expected)}, and the files have "
            f"{list(first.stored)}{more}: these are not one model"
        )


def _has_shape(checkpoint: Checkpoint, name: str) -> bool:
    """Return whether the shape of a tensor of the files is that of the weight, and not of codes that this program can't read."""
    if name in checkpoint.coded:
        return True
    return checkpoint.dtype(name) in dtypes.COMPUTE_DTYPES and not checkpoint.weights[name].packed


def _of_parts(live: str, tensor: torch.Tensor, parts: Mapping[str, tuple[Placement, Shape]]) -> Iterator[Misshapen]:
    """Yield each wrong shape of the tensors that loading packs into the tensor `live` of the module, such as all experts of a
    layer. parts: the placement and the shape of each tensor, by its name in the files.
    """
    wanted = tuple(tensor.shape)
    matrices: dict[int | None, list[tuple[str, Shape]]] = {}
    for name, (placement, shape) in parts.items():
        if placement.place is not None:
            matrices.setdefault(placement.place[0], []).append((name, shape))
    stacked = None not in matrices
    if not wanted or (stacked and len(wanted) < 2):
        return
    rows, *rest = wanted[1:] if stacked else wanted
    in_one = max(map(len, matrices.values()))
    of_files = (len(matrices),) if stacked else ()
    if stacked and len(matrices) != wanted[0]:
        yield Misshapen(live, (*of_files, rows, *rest), wanted)
    for held in matrices.values():
        if [*{shape[1:] for _, shape in held}] == [tuple(rest)] and sum(shape[0] for _, shape in held) == rows:
            continue
        if stacked and len(held) == in_one and rows % in_one == 0:  # gate and up have half of the rows each
            each = (rows // in_one, *rest)
            yield from (Misshapen(name, shape, each) for name, shape in held if shape != each)
        else:
            total = sum(shape[0] for _, shape in held if shape)
            yield Misshapen(held[0][0] if stacked else live, (total, *held[0][1][1:]), (rows, *rest))
