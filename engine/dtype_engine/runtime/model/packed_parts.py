"""Tells how loading packs several stored tensors, the parts, into one weight of the module, such as the experts of a layer.

One scale of the packed weight may cover a block, a row, a matrix (an expert) or the whole weight. If it covers several parts, the
file must store equal scales for them.
"""

from __future__ import annotations

from collections.abc import Mapping

from dtype_engine.core import dtypes
from dtype_engine.core.text import printable
from dtype_engine.runtime.model.name_mapping import Placement

Shape = tuple[int, ...]
Rows = list[list[str]]
"""The names of the stored tensors that form a packed weight: for each matrix, those stacked in its rows, top to bottom."""


def in_rows(placements: Mapping[str, Placement], shapes: Mapping[str, Shape], packed: Shape) -> Rows | None:
    """Return the names of the parts of a weight of shape `packed`, in the order of its rows. Return None if any part is not a group
    of whole rows in one of the weight's matrices. placements, shapes: where each part is loaded, and its shape, keyed by its name.
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
    """Return None if a weight of shape `packed` in `dtype` can have the scales of its parts. Otherwise return why not, as words for
    a message: the parts are not stacked in rows, or a block with one scale would extend over two parts or two rows.

    rows: the names of the parts in row order, or None if they are not stacked. shapes: their shapes, keyed by name.
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
    """Return the groups of parts that have one scale in a weight of shape `packed` in `dtype`: all parts in a format with a tensor
    scale, the parts of each matrix (if there are several) in a format with channel scales, and otherwise no groups.
    """
    row = dtypes.BY_NAME[dtype]
    if row.per_tensor or (row.blocks is not None and row.blocks.tensor_scale):
        return [[name for names in rows for name in names]]
    return rows if dtypes.has_channel_scales(packed, dtype) and len(packed) > 2 else []
