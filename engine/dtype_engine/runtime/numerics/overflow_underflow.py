"""Counts the values that a cast loses: finite values that become infinite or saturate, and nonzero values that become zero.

The result of a cast is read once, some elements at a time, which stay in the processor's cache. The original values are read only
where the result has an infinity or a zero. If the cast loses nothing, counting therefore takes a fraction of the time of the cast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dtype_engine.core import dtypes
from dtype_engine.core.block_formats import matrices
from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import Cancelled
from dtype_engine.core.llama_types import llama_type
from dtype_engine.results.losses import ValueLoss
from dtype_engine.runtime.formats.blocks import BlockWork, Chunk
from dtype_engine.runtime.formats.dequantize import torch_dtype
from dtype_engine.runtime.formats.quantize_blocks import quantize_chunks
from dtype_engine.runtime.formats.row_blocks import Rows, Values, as_rows, parallel_map, row_slices
from dtype_engine.runtime.formats.scales import FLOAT32_MAX
from dtype_engine.runtime.numerics.quantize import cast_or_quantize, quantize_in_blocks, saturates_beyond

_BIT_COUNTS = np.array([byte.bit_count() for byte in range(256)], dtype=np.uint8)
"""The number of one bits in each possible byte, indexed by the byte. numpy before version 2 has no function for this."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Counted = MutableMapping[tuple[str, str], ValueLoss | None]
"""How many values each cast loses, keyed by the names of the tensor and of the dtype. None if the cast only rounds values."""


class _Counts(NamedTuple):
    """How many values a cast loses among some elements of a tensor. `ValueLoss` describes the fields, except `zeros`."""

    overflowed: int = 0
    vanished: int = 0
    channels: int = 0
    saturated: int = 0
    nonfinite: int = 0
    zeros: int = 0
    """Number of zeros after the cast. The values may have been zero before."""


class LossCounter:
    """Counts the values that a cast loses, from some elements of a tensor at a time, in any order and from several threads."""

    def __init__(self, name: str, original: torch.Tensor | Values, dtype: str) -> None:
        self.name = name
        self.dtype = dtype
        self._original = original
        self._flat = original.reshape(-1)
        self._width = _rows(original, dtype).shape[1]
        self._parts: list[_Counts] = []

    def see(self, start: int, after: torch.Tensor, before: torch.Tensor | None = None) -> None:
        """Count the lost values among some successive elements of the flattened tensor. start: the index of the first element.
        after: the elements after the cast or, for a dtype with scales, the codes of whole rows, flat. before: the elements before
        the cast, flat; if None, they are read from the original tensor.
        """
        before = self._flat[start : start + len(after)] if before is None else before
        quantized = self.dtype in dtypes.STORAGE_DTYPES and llama_type(self.dtype) is None
        self._parts.append(
            _count_codes(before, after, self._width, self.dtype) if quantized else _count_cast(before, after)
        )

    def result(self, cancelled: IsCancelled = never) -> ValueLoss | None:
        """Return how many values are lost, or None if the cast only rounds. `see` must have seen all elements. Raises Cancelled."""
        return _listed(self.counted(cancelled))

    def counted(self, cancelled: IsCancelled = never) -> ValueLoss:
        """Return how many values are lost, like `result`, but also if the cast only rounds."""
        total = _Counts(*map(sum, zip(*self._parts, strict=True))) if self._parts else _Counts()
        channels = total.channels
        if self.dtype not in dtypes.STORAGE_DTYPES and total.vanished and 2 * total.zeros > self._width:
            channels = _channels_lost_by_cast(self._original, self.dtype, cancelled)
        return ValueLoss(
            tensor=self.name,
            dtype=self.dtype,
            overflowed=total.overflowed,
            vanished=total.vanished,
            elements=self._original.numel(),
            channels=channels,
            saturated=total.saturated,
            nonfinite=total.nonfinite,
        )


def count_losses(
    name: str, original: torch.Tensor, dtype: str, cast: torch.Tensor | None = None, cancelled: IsCancelled = never
) -> ValueLoss | None:
    """Return how many values of `original` become infinite, saturate or become zero in a cast to `dtype`, or None if the cast only
    rounds values. cast: the result of the cast, or the codes for a dtype with scales; if None, this function does the cast. Raises
    Cancelled.
    """
    return _listed(all_losses(name, original, dtype, cast, cancelled))


def all_losses(
    name: str, original: torch.Tensor, dtype: str, cast: torch.Tensor | None = None, cancelled: IsCancelled = never
) -> ValueLoss:
    """Return how many values are lost in a cast to `dtype`, like `count_losses`, but also if the cast only rounds values."""
    counter = LossCounter(name, original, dtype)

    def see(start: int, piece: torch.Tensor) -> None:
        if cancelled():
            raise Cancelled
        counter.see(start, piece)

    if llama_type(dtype) is not None:  # has values, not codes
        whole, target = (cast_or_quantize(original, dtype)[0] if cast is None else cast).reshape(-1), torch.float32
    elif dtype not in dtypes.STORAGE_DTYPES:
        whole, target = original.reshape(-1) if cast is None else cast.reshape(-1), torch_dtype(dtype)
    elif cast is not None:
        whole, target = cast.reshape(_rows(original, dtype).shape), cast.dtype
    else:
        _quantize(original, dtype, see)
        return counter.counted(cancelled)
    width, pieces = math.prod(whole.shape[1:]), row_slices(whole)

    def some(numbers: Iterable[int]) -> None:
        for number in numbers:
            see(pieces[number].start * width, whole[pieces[number]].reshape(-1).to(target))

    parallel_map(some, len(pieces))
    return counter.counted(cancelled)


def _listed(loss: ValueLoss) -> ValueLoss | None:
    return loss if loss.elements and loss.is_listed else None


def _rows(original: torch.Tensor | Values, dtype: str) -> Rows:
    """Return a view of a tensor as a matrix [rows, width]. If `dtype` has block scales, its blocks are parts of this matrix.
    Otherwise, each row is an output channel, or has a scale of its own.
    """
    blocks = dtypes.BY_NAME[dtype].blocks
    if blocks is None:
        return as_rows(original, dtype)
    count, height, width = matrices(original.shape, blocks.columns)
    return original.reshape(count * height, width)


def _quantize(original: torch.Tensor, dtype: str, on_rows: Callable[[int, torch.Tensor], None]) -> None:
    element = dtypes.BY_NAME[dtype]
    if element.blocks is None:
        quantize_in_blocks(original, dtype, on_rows)
        return

    def take(_: BlockWork, chunk: Chunk) -> None:
        codes = chunk.codes(element)
        on_rows(chunk.first * codes.shape[1], codes.reshape(-1))

    quantize_chunks(original, dtype, take)


def _count_cast(before: torch.Tensor, after: torch.Tensor) -> _Counts:
    """Return the counts, except `channels`, for a cast to a dtype without scales. `after` may be on a GPU."""
    zeros = count_zeros(after)
    vanished = zeros - count_zeros(before) if zeros else 0
    if _is_finite(after):  # a value that is not finite before the cast is not finite after it
        return _Counts(vanished=vanished, zeros=zeros)
    finite = torch.isfinite(before)
    overflowed = finite & ~torch.isfinite(after).to(before.device)
    nonfinite = before.numel() - int(finite.sum())
    return _Counts(overflowed=int(overflowed.sum()), vanished=vanished, nonfinite=nonfinite, zeros=zeros)


def _count_codes(before: torch.Tensor, codes: torch.Tensor, width: int, dtype: str) -> _Counts:
    """Return the counts for some rows of `width` values (`before`) that were quantized to `codes`. No value can become infinite."""
    zeros = count_zeros(codes)
    vanished = zeros - count_zeros(before) if zeros else 0
    channels = saturated = nonfinite = 0
    limit = saturates_beyond(dtype)
    if not _is_within(before, limit):
        # Codes are made from float32 values, which may be infinite where the original float64 values are finite.
        saturated = int((before.to(torch.float32).abs() > limit).sum())
        nonfinite = before.numel() - int(torch.isfinite(before).sum())
        vanished -= count_zeroed_nan(before, dtype) if zeros else 0
    if vanished and width < 2 * zeros:
        zero = magnitude_bits(codes.cpu()).reshape(-1, width) == 0
        # Counting bits is ten times as fast as adding up booleans.
        many = torch.from_numpy(2 * _BIT_COUNTS[np.packbits(zero, axis=1)].sum(axis=1, dtype=np.int64) > width)
        if bool(many.any()):
            original = before.view(-1, width)[many.to(before.device)].cpu()
            channels = _lost_channels((original != 0) & ~torch.isnan(original), torch.from_numpy(zero)[many])
    return _Counts(vanished=vanished, channels=channels, saturated=saturated, nonfinite=nonfinite)


def _is_finite(values: torch.Tensor) -> bool:
    """Return True only if all values are finite. False may be wrong, since the sum of finite values may overflow."""
    return math.isfinite(float(values.sum(dtype=torch.float32)))


def _is_within(values: torch.Tensor, limit: float) -> bool:
    """Return True only if no |value| exceeds the limit and none is NaN. False may be wrong."""
    if limit == FLOAT32_MAX:
        return _is_finite(values)
    if values.numel() == 0:
        return True
    return float(torch.maximum(values.amax(), -values.amin())) <= limit


def count_zeroed_nan(before: torch.Tensor, dtype: str) -> int:
    """Return how many NaNs become zeros because a dtype with scales has no code for NaN."""
    row = dtypes.BY_NAME[dtype]
    return int(torch.isnan(before).sum()) if row.llama is None and (row.kind == "int" or row.bits < 8) else 0


def count_zeros(values: torch.Tensor) -> int:
    """Return the number of zeros, of either sign, in a flat tensor."""
    if values.device.type == "cuda":
        return values.numel() - int(torch.count_nonzero(values))
    return values.numel() - int(np.count_nonzero(magnitude_bits(values.cpu())))  # others lack kernels for float8


def magnitude_bits(values: torch.Tensor) -> npt.NDArray[Any]:
    """Return the bits of a flat CPU tensor as numpy integers, which are compared and counted several times as fast as floats in
    torch. For floats, the sign bit is cleared: the integers have the order of the absolute values, with NaN above infinity.
    """
    bits: npt.NDArray[Any] = values.view(_BITS[values.element_size()]).numpy()
    return bits & np.iinfo(bits.dtype).max if values.is_floating_point() else bits


def _lost_channels(nonzero: torch.Tensor, zero_after: torch.Tensor) -> int:
    """Return the number of rows in which more than half of the nonzero values become zero. Both masks are bool [rows, width]."""
    return int((2 * (nonzero & zero_after).sum(dim=1) > nonzero.sum(dim=1)).sum())


def _channels_lost_by_cast(original: torch.Tensor | Values, dtype: str, cancelled: IsCancelled) -> int:
    """Return the number of output channels in which a cast makes more than half of the nonzero values zero. Raises Cancelled."""
    rows, target = as_rows(original), torch_dtype(dtype)
    gone = 0
    for piece in row_slices(rows):
        if cancelled():
            raise Cancelled
        part = rows[piece]
        gone += _lost_channels(part != 0, part.to(target) == 0)
    return gone
