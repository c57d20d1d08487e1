"""Scales that several tensors of an export have in common. Weights that runtimes fuse into one matrix, such as query, key and
value, share a scale (see `core.fused`). So do weights that loading packs into one weight, such as the experts of a layer, if the
packed weight has one scale for them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.core.fused import scale_groups
from dtype_engine.core.text import printable
from dtype_engine.core.tree import TensorInfo
from dtype_engine.runtime.export.contents import ExportTensor, SharedScale
from dtype_engine.runtime.model.name_mapping import Placement
from dtype_engine.runtime.model.packed_parts import in_rows, other_scales, sharing


def with_shared_scales(items: list[ExportTensor], canonical: Mapping[str, str]) -> list[ExportTensor]:
    """Return the weights to export. Weights that runtimes fuse get a common scale, if their format has one scale for the whole
    tensor. canonical: maps each tensor's name in the files to its name in the model.
    """
    cast = {canonical[item.name]: item for item in items if item.name in canonical and item.dtype != item.stored}
    shared: dict[tuple[str, ...], SharedScale] = {}
    of_item: dict[str, SharedScale] = {}
    for name, members in scale_groups({name: item.dtype for name, item in cast.items()}).items():
        among = [cast[member] for member in members]
        if members not in shared:
            shared[members] = SharedScale(tuple(each.name for each in among), [each.source for each in among])
        of_item[cast[name].name] = shared[members]
    return [dataclasses.replace(item, shared=of_item[item.name]) if item.name in of_item else item for item in items]


def with_packed_scales(
    items: list[ExportTensor], infos: Mapping[str, TensorInfo], placements: Mapping[str, Placement]
) -> list[ExportTensor]:
    """Return the weights to export, with `packed_into` set for each weight that loading packs with others into one weight. If a
    scale of the packed weight covers several of its parts, these parts get a common scale. infos, placements: the model's tensor
    for each tensor of the files, and where the tensor is loaded in it. Raises UserError if the packed weight can't have the same
    scales as its parts, for example because a block would extend over two parts.
    """
    into = {name: placement.name for name, placement in placements.items() if placement.part}
    items = [dataclasses.replace(item, packed_into=into[item.name]) if item.name in into else item for item in items]
    packed: dict[str, dict[str, ExportTensor]] = {}
    for item in items:
        if item.packed_into and item.dtype in dtypes.STORAGE_DTYPES and item.dtype != item.stored:
            packed.setdefault(item.packed_into, {})[item.name] = item
        elif not item.packed_into:
            _refuse_turned(item, infos.get(item.name))
    shared: dict[str, SharedScale] = {}
    for live, parts in packed.items():
        first, item = next(iter(parts.items()))
        info = infos[first]
        shapes = {name: part.shape for name, part in parts.items()}
        rows = in_rows({name: placements[name] for name in parts}, shapes, info.shape)
        why = other_scales(rows, shapes, info.shape, item.dtype)
        if why is not None or rows is None:
            raise UserError(
                f"{printable(live)} is packed of several tensors of the checkpoint, first {printable(first)}, and can't be "
                f"exported in {item.dtype}, as these would have other scales: {why}; export it in one of "
                f"{', '.join(dtypes.COMPUTE_DTYPES)}, or in a format with smaller blocks"
            )
        for among in sharing(rows, info.shape, item.dtype):
            of_all = SharedScale(tuple(among), [parts[name].source for name in among])
            shared |= dict.fromkeys(among, of_all)
    return [dataclasses.replace(item, shared=shared[item.name]) if item.name in shared else item for item in items]


def _refuse_turned(item: ExportTensor, info: TensorInfo | None) -> None:
    """Raise UserError if a weight gets scales and its shape in the model differs from that in the file, for example transposed."""
    if info is None or item.dtype not in dtypes.STORAGE_DTYPES or item.dtype == item.stored or info.shape == item.shape:
        return
    raise UserError(
        f"{printable(item.name)} is {list(item.shape)} in the checkpoint and {list(info.shape)} in the model, so it can't be "
        f"exported in {item.dtype}, as it would have other scales; export it in one of {', '.join(dtypes.COMPUTE_DTYPES)}"
    )
