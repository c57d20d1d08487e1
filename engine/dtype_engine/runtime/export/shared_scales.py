"""Scales that several tensors of an export share: fused siblings (`core.fused`), and parts of what loading packs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from dtype_engine.core.fused import scale_groups
from dtype_engine.runtime.export.contents import ExportTensor, SharedScale


def with_shared_scales(items: list[ExportTensor], canonical: Mapping[str, str]) -> list[ExportTensor]:
    """The items, fused siblings with the scale that they share. canonical: the names in the model by those in the files."""
    cast = {canonical[item.name]: item for item in items if item.name in canonical and item.dtype != item.stored}
    shared: dict[tuple[str, ...], SharedScale] = {}
    of_item: dict[str, SharedScale] = {}
    for name, members in scale_groups({name: item.dtype for name, item in cast.items()}).items():
        among = [cast[member] for member in members]
        if members not in shared:
            shared[members] = SharedScale(tuple(each.name for each in among), [each.values for each in among])
        of_item[cast[name].name] = shared[members]
    return [dataclasses.replace(item, shared=of_item[item.name]) if item.name in of_item else item for item in items]
