"""The codes and scales that a rounding such as GPTQ chose for a weight, in a temporary file."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from dtype_engine.core import dtypes
from dtype_engine.core.block_formats import scale_grid
from dtype_engine.core.llama_types import llama_type
from dtype_engine.results.losses import ValueLoss
from dtype_engine.runtime.formats.dequantize import torch_dtype
from dtype_engine.runtime.formats.scales import Scales
from dtype_engine.runtime.numerics.roundings import RoundedCodes
from dtype_engine.runtime.weights.temporary_file import StoredVector, TemporaryFile


@dataclass(frozen=True, slots=True)
class KeptCodes:
    """Where the codes and scales of a weight are in a file, as vectors."""

    file: TemporaryFile
    dtype: str
    """A name in `core.dtypes`."""
    shape: tuple[int, ...]
    codes: StoredVector
    scale: StoredVector
    grid: tuple[int, ...]
    """The shape of the scales: [channels], or [blocks down, blocks across]."""
    in_export: StoredVector | None = None
    """The scales as an export stores them, or None if they are not kept."""
    zero: StoredVector | None = None
    """The zero points of the blocks, or None if the format has none, or they are not kept."""
    nearest: tuple[int, ...] = ()
    """As `RoundedCodes.nearest`."""
    loss: ValueLoss | None = None
    """What the cast loses, if that was counted; None if it only rounds values."""

    def read(self, rows: slice | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (codes, scales) at the indexes `rows` of the first dimension, or of the whole weight. `rows` may split no block.
        Raises UserError if the file can't be read.
        """
        if rows is None:
            return self.file.take(self.codes).view(self.shape), self.file.take(self.scale).view(self.grid)
        width, across = math.prod(self.shape[1:]), math.prod(self.grid[1:])
        codes = self.file.take(self.codes, slice(rows.start * width, rows.stop * width)).view(-1, *self.shape[1:])
        if llama_type(self.dtype) is not None:  # has one scale, which is 1
            return codes, self.file.take(self.scale)
        of_rows = self._rows_of_scales(rows)
        scale = self.file.take(self.scale, slice(of_rows.start * across, of_rows.stop * across))
        return codes, scale.view(-1, *self.grid[1:])

    def scales(self, rows: slice | None = None) -> Scales:
        """Return the scales of the blocks or channels at the indexes `rows` of the first dimension, or of the whole weight, with
        what an export stores, which must be in the file.
        """
        across = math.prod(self.grid[1:])
        of_rows = slice(0, self.grid[0]) if rows is None else self._rows_of_scales(rows)
        part = slice(of_rows.start * across, of_rows.stop * across)
        effective, stored, zero = (
            None if vector is None else self.file.take(vector, part).view(-1, across)
            for vector in (self.scale, self.in_export, self.zero)
        )
        assert effective is not None
        assert stored is not None
        return Scales(effective, stored, zero)

    def _rows_of_scales(self, rows: slice) -> slice:
        blocks = dtypes.BY_NAME[self.dtype].blocks
        high = 1 if blocks is None or len(self.shape) > 2 else blocks.rows
        each = self.grid[0] // self.shape[0] if high == 1 else 1
        return slice(rows.start // high * each, -(-rows.stop // high) * each)


def keep_codes(
    file: TemporaryFile, dtype: str, shape: tuple[int, ...], made: Iterable[RoundedCodes], for_export: bool
) -> KeptCodes:
    """Write the codes and scales of a weight to a file. made: of the whole weight, or of one index of its first dimension after
    another. for_export: whether also to write the scales as an export stores them. Raises UserError if the file can't be written.
    """
    start, nearest = file.nbytes, list[int]()
    scale, in_export, zero = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
    for index, each in enumerate(made):
        codes = file.put(each.codes.reshape(-1))  # those of the next index follow without a gap
        nearest += [index + number for number in each.nearest]
        scale.append(each.scale)
        in_export.append(each.scales.stored)
        if each.scales.zero is not None:
            zero.append(each.scales.zero)
    one_scale = llama_type(dtype) is not None
    whole = scale[0] if one_scale else torch.cat(scale)

    def exported(those: list[torch.Tensor]) -> StoredVector | None:
        return file.put(torch.cat(those).reshape(-1)) if those and for_export and not one_scale else None

    return KeptCodes(
        file=file,
        dtype=dtype,
        shape=shape,
        codes=StoredVector(start, math.prod(shape), codes.dtype, codes.device),
        scale=file.put(whole.reshape(-1)),
        grid=tuple(whole.shape),
        in_export=exported(in_export),
        zero=exported(zero),
        nearest=tuple(nearest),
    )


def nbytes_kept(shape: tuple[int, ...], dtype: str) -> int:
    """Return about how many bytes `keep_codes` writes for a weight, if also for an export."""
    blocks = dtypes.BY_NAME[dtype].blocks
    scales = shape[0] if blocks is None else math.prod(scale_grid(shape, blocks))
    return math.prod(shape) * torch_dtype(dtype).itemsize + 8 * scales
