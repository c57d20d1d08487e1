"""Gives the weights of an export the values that roundings such as GPTQ chose for the weights of an open model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from dtype_engine.core import dtypes
from dtype_engine.core.block_formats import matrices
from dtype_engine.core.errors import UserError
from dtype_engine.core.text import printable
from dtype_engine.runtime.export.contents import Contents, ExportTensor
from dtype_engine.runtime.formats.dequantize import dequantize
from dtype_engine.runtime.formats.scales import Scales
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.model.name_mapping import Placement
from dtype_engine.runtime.model.packed_parts import in_rows
from dtype_engine.runtime.model.weight import Weight
from dtype_engine.runtime.weights.kept_codes import KeptCodes


def unrounded(planned: Mapping[str, str]) -> dict[str, str]:
    """Return the dtypes of a plan without their roundings: those that a file stores."""
    return {name: dtypes.unrounded(dtype) for name, dtype in planned.items()}


def with_roundings(
    items: Iterable[ExportTensor],
    canonical: Mapping[str, str],
    planned: Mapping[str, str],
    source: RoundedSource | None = None,
) -> list[ExportTensor]:
    """Return the weights to export, each with its rounding under a plan and, if the weights of an open model are given, with the
    values that it chose.

    canonical: maps each tensor's name in the files to its name in the model. planned: the dtypes by the names in the model.
    """
    found = []
    for item in items:
        dtype = planned.get(canonical.get(item.name, ""), item.dtype)
        row = dtypes.BY_NAME.get(dtype)
        if row is None or not row.rounding:
            found.append(item)
            continue
        rounded = None if source is None else source.of(item, canonical[item.name], dtype)
        found.append(dataclasses.replace(item, rounding=row.rounding, rounded=rounded))
    return found


@dataclass(frozen=True, slots=True)
class RoundedRows:
    """The values that a rounding chose for a weight, or for some of its rows, which a file stores as a tensor of its own."""

    weight: Weight
    shape: tuple[int, ...]
    """The shape of the tensor in the file."""
    rows: slice | None = None
    """The indexes of its rows among those of all matrices of the weight, or None for all."""

    def read(self) -> tuple[torch.Tensor, Scales]:
        """Return (values of the format, float32 in `shape`; the scales of their blocks or channels), from which the nearest codes
        are those that the rounding chose.
        """
        codes, scale, scales, before = self._codes()
        values = dequantize(codes, scale, torch.float32, dtypes.BY_NAME[self.weight.dtype].blocks)
        if self.rows is None:
            return values, scales
        count, height, width = matrices(values.shape, values.shape[-1])
        rows = slice(self.rows.start - before, self.rows.stop - before)
        values = values.reshape(count * height, width)[rows].reshape(self.shape)
        if len(scales.effective) == count < count * height:  # one scale for each matrix
            scales = scales.rows(slice(rows.start // height, rows.start // height + 1))
            return values, Scales(*(each.expand(len(values), 1) for each in (scales.effective, scales.stored)))
        return values, scales.rows(rows)

    def _codes(self) -> tuple[torch.Tensor, torch.Tensor, Scales, int]:
        """Return (codes, their scales, the same with what a file stores, the number of the weight's rows before them): of the whole
        weight or, if it stays on the disk and is cast in parts, of the parts that have the tensor's rows.
        """
        rounded, part, before = self.weight.rounded, None, 0
        assert rounded is not None
        if not isinstance(rounded, KeptCodes):
            held = self.weight.tensor if self.weight.stashed is None else self.weight.stashed
            return held.data, rounded.scale, rounded.scales, 0
        if self.rows is not None and self.weight.in_parts(self.weight.dtype):
            height = math.prod(rounded.shape[1:-1])
            part = slice(self.rows.start // height, -(-self.rows.stop // height))
            before = part.start * height
        return *rounded.read(part), rounded.scales(part), before


@dataclass(frozen=True, slots=True)
class RoundedSource:
    """The open model whose weights an export writes, and where it has the tensors of the files."""

    model: LiveModel
    placements: Mapping[str, Placement]
    shapes: Mapping[str, tuple[int, ...]]
    """The shapes of the tensors in the files, by name."""

    def of(self, item: ExportTensor, live: str, dtype: str) -> RoundedRows | None:
        """Return the values that a rounding chose for a tensor of the files, or None if it left the nearest ones, or the weight is
        not cast to `dtype` yet. live: the name of the weight in the model, which may pack several tensors.
        """
        weight = self.model.weights[live]
        if weight.dtype != dtype or weight.rounded is None:
            return None
        if not item.packed_into:
            return RoundedRows(weight, item.shape)
        parts = {name: place for name, place in self.placements.items() if place.part and place.name == live}
        rows = in_rows(parts, {name: self.shapes[name] for name in parts}, weight.info.shape) or []
        start = 0
        for name in (name for names in rows for name in names):
            height = self.shapes[name][0]
            if name == item.name:
                return RoundedRows(weight, item.shape, slice(start, start + height))
            start += height
        raise AssertionError(f"{item.name} is not among the parts of {live}")  # `with_packed_scales` has refused it


def needs_fitting(contents: Contents) -> bool:
    """Return whether an export has roundings that were not fitted yet: the model has to be cast by the recipe before."""
    return contents.fitted_to is None and any(item.rounding for item in contents.items)


def refuse_unfitted(contents: Contents) -> None:
    """Raise UserError for an export with roundings that were not fitted."""
    if needs_fitting(contents):
        first = next(item for item in contents.items if item.rounding)
        raise UserError(
            f"{printable(first.name)} is to be rounded by {first.rounding}, which needs runs on calibration inputs: open the "
            "model, apply the recipe, and export it from there"
        )


def rounding_notices(items: Sequence[ExportTensor]) -> tuple[str, ...]:
    """Return a notice on weights that a rounding left at the nearest values, or ()."""
    left = [item for item in items if item.rounding and item.rounded is None]
    if not left:
        return ()
    return (
        f"{len(left)} weights, first {printable(left[0].name)}, have the nearest values: no matrix product used them in the "
        "calibration runs",
    )
