"""Packs several stored tensors with scales, such as those of a layer's experts, into one weight of the module, as transformers does
on loading. The stored tensors are called the parts of the weight.

One scale of the packed weight may cover a block, a row, a matrix (an expert) or the whole weight. If it covers values of one part
only, the file stores the same scale for this part. If it covers several parts, the file must store equal scales for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from dtype_engine.checkpoint import QuantizedWeight
from dtype_engine.core import dtypes
from dtype_engine.core.errors import NoForward
from dtype_engine.core.text import printable
from dtype_engine.runtime.model.mmap_reader import read_quantized
from dtype_engine.runtime.model.name_mapping import Placement
from dtype_engine.runtime.numerics.quantize import torch_dtype

Shape = tuple[int, ...]
Rows = list[list[str]]
"""The names of the stored tensors that form a packed weight: for each matrix, those stacked in its rows, top to bottom."""


def in_rows(placements: Mapping[str, Placement], shapes: Mapping[str, Shape], packed: Shape) -> Rows | None:
    """Return the names of the stored tensors that loading packs into one weight of shape `packed`, in the order of its rows.
    Returns None unless each of them is a group of whole rows in one of the weight's matrices.

    placements, shapes: where each of these tensors is loaded, and its shape, both keyed by its name.
    """
    matrices: dict[int | None, list[str]] = {}
    known = {name: place.place for name, place in placements.items() if place.place is not None}
    for name in sorted(known, key=lambda name: (known[name][0] or 0, known[name][1])):
        matrices.setdefault(known[name][0], []).append(name)
    if len(packed) < 2 or any(len(shapes[name]) != 2 for name in placements):
        return None
    stacked = None not in matrices
    whole = (len(matrices), *packed[1:]) if stacked else packed
    heights = {sum(shapes[name][0] for name in names) for names in matrices.values()}
    widths = {shapes[name][1:] for name in placements}
    if (
        len(known) < len(placements)
        or len(packed) != (3 if stacked else 2)
        or whole != packed
        or heights != {packed[-2]}
        or widths != {packed[-1:]}
    ):
        return None
    return list(matrices.values())


def other_scales(rows: Rows | None, shapes: Mapping[str, Shape], packed: Shape, dtype: str) -> str | None:
    """Return None if a weight can have the scales of the stored tensors from which it is packed. Otherwise return why not, as words
    for a message.

    There are two reasons: the stored tensors are not stacked in rows, or a block with one scale would extend over two stored
    tensors or two rows. rows: the names of the stored tensors in row order, or None if they are not stacked. shapes: their shapes,
    keyed by name. packed: the shape of the weight. dtype: its dtype.
    """
    if rows is None:
        return "loading does not stack its parts one below the other, but combines them in another way"
    blocks = dtypes.BY_NAME[dtype].blocks
    if blocks is None:
        return None
    if len(packed) > 2 and packed[-1] < blocks.columns:
        return f"its rows have {packed[-1]} values, fewer than a block, so blocks reach from one row to the next"
    split = next((name for names in rows for name in names[:-1] if shapes[name][0] % blocks.rows), None)
    if split is None:
        return None
    return (
        f"its part {printable(split)} has {shapes[split][0]} rows, no multiple of {blocks.rows}, so blocks reach from one part "
        "into the next"
    )


def sharing(rows: Rows, packed: Shape, dtype: str) -> list[list[str]]:
    """Return groups of stored tensors that need a common scale, because the packed weight has one scale for all of them. In a
    format with a tensor scale, this is a single group of all tensors. In a format with channel scales, there is a group for each
    matrix, if the weight has several matrices. Otherwise, there are no groups.

    rows: the names of the stored tensors in row order. packed: the shape of the weight. dtype: its dtype.
    """
    row = dtypes.BY_NAME[dtype]
    if row.per_tensor or (row.blocks is not None and row.blocks.tensor_scale):
        return [[name for names in rows for name in names]]
    return rows if dtypes.has_channel_scales(packed, dtype) and len(packed) > 2 else []


def pack(
    title: str, parts: Mapping[str, QuantizedWeight], placements: Mapping[str, Placement], packed: Shape
) -> tuple[str, torch.Tensor, torch.Tensor]:
    """Pack several stored tensors, each with scales of its own, into one weight. Returns its dtype, codes and float32 scales.

    title: the name of the weight. parts: the stored tensors, keyed by name. placements: where loading places each of them. packed:
    the shape of the weight. Raises NoForward if the codes and scales of the stored tensors do not fit into one weight.
    """
    shapes = {name: part.shape for name, part in parts.items()}
    (dtype, *others) = dict.fromkeys(part.dtype for part in parts.values())
    why = f"its parts are in {' and '.join((dtype, *others))}" if others else None
    rows = in_rows(placements, shapes, packed)
    why = why or other_scales(rows, shapes, packed, dtype)
    if why is not None or rows is None:
        raise NoForward(f"{title}: no forward pass: {why}")
    codes = torch.empty(packed, dtype=torch_dtype(dtype))
    matrices = codes.view(len(rows), -1, packed[-1])
    scales: list[torch.Tensor] = []
    for matrix, names in zip(matrices, rows, strict=True):
        at = 0
        for name in names:
            data, scale = read_quantized(parts[name])
            matrix[at : at + len(data)].view(torch.uint8).copy_(data.view(torch.uint8))
            at += len(data)
            scales.append(scale)
    return dtype, codes, _scale(title, scales, rows, packed, dtype)


def _scale(title: str, scales: Sequence[torch.Tensor], rows: Rows, packed: Shape, dtype: str) -> torch.Tensor:
    """Return the scales of a packed weight. scales: the scales of its stored tensors, in the order of `rows`. rows: the names of
    these tensors. title: the name of the weight. packed: its shape. Raises NoForward if tensors with different scales would need a
    common one.
    """
    if dtypes.BY_NAME[dtype].blocks is not None:
        return torch.cat(list(scales))
    names = [name for each in rows for name in each]
    own = dict(zip(names, scales, strict=True))
    shared = sharing(rows, packed, dtype)
    if not shared:
        return torch.cat(list(scales))
    found = [torch.cat([own[name] for name in among]) for among in shared]
    if any(bool((each != each[0]).any()) for each in found):
        raise NoForward(
            f"{title}: no forward pass: its parts have several scales where it has one in {dtype} when it is packed"
        )
    return torch.stack([each[0] for each in found])
