"""Counting the values that a cast loses: finite ones that become infinite, and others that become zero.

What a cast gave is read once, in pieces that stay in the processor's cache. Only where a piece holds an infinity or a zero
are the original values read, so that a cast that loses nothing costs a fraction of the cast itself.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass

import numpy as np
import torch

from dtype_engine.core import dtypes
from dtype_engine.core.block_formats import matrices
from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import Cancelled
from dtype_engine.results.losses import ValueLoss, rounding_share
from dtype_engine.runtime.formats.blocks import BlockWork, Chunk
from dtype_engine.runtime.formats.quantize_blocks import quantize_chunks
from dtype_engine.runtime.formats.row_blocks import Rows, Values, as_rows, parallel_map
from dtype_engine.runtime.numerics.quantize import (
    quantize_in_blocks,
    torch_dtype,
)

PIECE = 1 << 18
"""Elements that are counted at once."""
_DEVICE_PIECE = 1 << 24
"""The same on an accelerator, which is waited for after each piece."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Counted = MutableMapping[tuple[str, str], ValueLoss | None]
"""Losses by (tensor, dtype): what was counted once is not counted again."""


@dataclass(slots=True)
class _Counts:
    """What adds up over the pieces of a tensor."""

    overflowed: int = 0
    vanished: int = 0
    channels: int = 0
    saturated: int = 0
    nonfinite: int = 0
    zeros: int = 0
    """After the cast, whatever they were before."""

    def add(self, other: _Counts) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class LossCounter:
    """Counts what a cast loses while its pieces are made, in any order and in several threads at once."""

    def __init__(self, name: str, original: torch.Tensor | Values, dtype: str) -> None:
        self.name = name
        self.dtype = dtype
        self._original = original
        self._flat = original.reshape(-1)
        self._width = _rows(original, dtype).shape[1]
        self._floats: list[_Counts] = []
        self._codes: list[_CodeRows] = []

    def see(self, start: int, after: torch.Tensor, before: torch.Tensor | None = None) -> None:
        """A flat piece of the cast tensor, from its element `start` on; of a dtype with scales the codes of whole rows.

        before: the piece that it was made from, where that is at hand.
        """
        before = self._flat[start : start + len(after)] if before is None else before
        if self.dtype in dtypes.STORAGE_DTYPES:
            self._codes.append(_summarize_codes(before, after.view(-1, self._width)))
        else:
            self._floats.append(_count_piece(before, after))

    def result(self, cancelled: IsCancelled = never) -> ValueLoss | None:
        """The loss, when all pieces were seen; None where nothing is lost but by rounding, as `ValueLoss.is_listed` has it."""
        if not self._original.numel():
            return None
        total = _Counts()
        for counts in self._floats:
            total.add(counts)
        if self._codes:
            zeros = sum(part.zeros for part in self._codes)
            much = zeros >= rounding_share(self.dtype) * self._original.numel()
            if not much and not any(part.empty or part.beyond for part in self._codes):
                return None  # the values themselves need not be read
            total = _count_codes(self._original, self.dtype, cancelled)
        elif total.vanished and total.zeros >= self._width:  # else there is no channel of zeros
            total.channels = _vanished_channels(self._original, self.dtype, cancelled)
        loss = ValueLoss(
            tensor=self.name,
            dtype=self.dtype,
            overflowed=total.overflowed,
            vanished=total.vanished,
            elements=self._original.numel(),
            channels=total.channels,
            saturated=total.saturated,
            nonfinite=total.nonfinite,
        )
        return loss if loss.is_listed else None


def count_losses(
    name: str, original: torch.Tensor, dtype: str, cast: torch.Tensor | None = None, cancelled: IsCancelled = never
) -> ValueLoss | None:
    """What a cast of `original` to `dtype` loses; None where nothing is lost but by rounding (see `ValueLoss.is_listed`).

    cast: what the cast gave (the codes, of a dtype with scales) where it is there already; else pieces are cast here. Raises
    Cancelled.
    """
    if not original.numel():
        return None
    counter = LossCounter(name, original, dtype)
    before, after = original.reshape(-1), cast.reshape(-1) if cast is not None else None
    quantized, target = dtype in dtypes.STORAGE_DTYPES, torch_dtype(dtype)
    width = _rows(original, dtype).shape[1]

    def see(start: int, piece: torch.Tensor) -> None:
        if cancelled():
            raise Cancelled
        counter.see(start, piece)

    if quantized and after is None:
        _quantize(original, dtype, see)
        return counter.result(cancelled)
    step = PIECE if after is None or after.device.type == "cpu" else _DEVICE_PIECE
    if quantized:
        step = max(1, step // width) * width

    def some(numbers: range) -> None:
        for number in numbers:
            piece = slice(number * step, (number + 1) * step)
            see(number * step, before[piece].to(target) if after is None else after[piece])

    parallel_map(some, -(-len(before) // step))
    return counter.result(cancelled)


def _rows(original: torch.Tensor | Values, dtype: str) -> Rows:
    """What is quantized, as rows: those that have blocks in a format with blocks, else output channels."""
    blocks = dtypes.BY_NAME[dtype].blocks
    if blocks is None:
        return as_rows(original)
    count, height, width = matrices(original.shape, blocks.columns)
    return original.reshape(count * height, width)


def _quantize(original: torch.Tensor | Values, dtype: str, on_rows: Callable[[int, torch.Tensor], None]) -> None:
    """Calls `on_rows(start, codes)` with the codes of some rows, flat, and the index of their first element."""
    element = dtypes.BY_NAME[dtype]
    if element.blocks is None:
        quantize_in_blocks(original, dtype, on_rows)
        return

    def take(_: BlockWork, chunk: Chunk) -> None:
        codes = chunk.codes(element)
        on_rows(chunk.first * codes.shape[1], codes.reshape(-1))

    quantize_chunks(original, dtype, take)


def _count_piece(before: torch.Tensor, after: torch.Tensor) -> _Counts:
    """The counts of one flat piece. `after` may be on another device."""
    if _is_finite(after):  # then so was all of it before
        zeros = count_zeros(after)
        return _Counts(vanished=zeros - count_zeros(before) if zeros else 0, zeros=zeros)
    after = after.to(before.device)
    finite = torch.isfinite(before)
    return _Counts(
        overflowed=int((finite & ~torch.isfinite(after)).sum()),
        vanished=int(((after == 0) & (before != 0)).sum()),
        zeros=count_zeros(after),
        nonfinite=before.numel() - int(finite.sum()),
    )


def _is_finite(values: torch.Tensor) -> bool:
    """Whether all of a flat floating-point tensor is finite. On the CPU torch takes several times as long as integers do: of two
    floats of one sign the larger magnitude has the larger bits.
    """
    if values.device.type != "cpu":
        return bool(torch.isfinite(torch.stack(torch.aminmax(values))).all())
    size = values.element_size()
    bits = values.view(_BITS[size]).numpy()
    infinity = int(torch.tensor(torch.inf, dtype=values.dtype).view(_BITS[size]))
    largest_negative = int(bits.view(f"u{size}").max())
    return int(bits.max()) < infinity and largest_negative < infinity + (1 << (8 * size - 1))


def count_zeros(values: torch.Tensor) -> int:
    """How many of a flat tensor are zero, of either sign. The bits are counted as integers, which is several times as fast."""
    bits = values.view(_BITS[values.element_size()])
    if bits.device.type != "cpu":
        return values.numel() - int(torch.count_nonzero(values))
    numbers = bits.numpy()
    zeros = numbers.size - int(np.count_nonzero(numbers))
    lowest = torch.iinfo(bits.dtype).min
    if values.is_floating_point() and int(numbers.min()) == lowest:  # there is a -0.0
        zeros += numbers.size - int(np.count_nonzero(numbers - lowest))
    return zeros


def _vanished_channels(original: torch.Tensor | Values, dtype: str, cancelled: IsCancelled) -> int:
    """Output channels that had values and have none after the cast, a few rows at a time."""
    rows, target = as_rows(original), torch_dtype(dtype)
    step = max(1, PIECE // max(1, rows.shape[1]))
    gone = 0
    for start in range(0, rows.shape[0], step):
        if cancelled():
            raise Cancelled
        part = rows[start : start + step]
        if len(part) == 1:
            gone += _is_gone(part[0], target)
        else:
            gone += int(((part != 0).any(dim=1) & ~(part.to(target) != 0).any(dim=1)).sum())
    return gone


def _is_gone(row: torch.Tensor, target: torch.dtype) -> bool:
    """Whether a row, which may be long, had values and has none after the cast."""
    had = False
    for start in range(0, len(row), PIECE):
        part = row[start : start + PIECE]
        if bool((part.to(target) != 0).any()):
            return False
        had = had or bool((part != 0).any())
    return had


def _count_codes(original: torch.Tensor | Values, dtype: str, cancelled: IsCancelled) -> _Counts:
    """The counts of a dtype with scales: nothing overflows in it. The codes are made once more, beside the values."""
    rows = _rows(original, dtype)
    parts: list[_Counts] = []  # appended to from several threads

    def take(start: int, codes: torch.Tensor) -> None:
        if cancelled():
            raise Cancelled
        first, part = start // rows.shape[1], codes.view(-1, rows.shape[1])
        parts.append(_count_code_rows(rows[first : first + len(part)], part))

    _quantize(original, dtype, take)
    total = _Counts()
    for counts in parts:
        total.add(counts)
    return total


@dataclass(frozen=True, slots=True)
class _CodeRows:
    """Of some rows in a dtype with scales: zeros among the codes, whether a row is all zero, whether a value is beyond float32."""

    zeros: int
    empty: bool
    beyond: bool


def _summarize_codes(before: torch.Tensor, codes: torch.Tensor) -> _CodeRows:
    low, high = torch.aminmax(before)
    largest = max(-float(low), float(high))
    zeros = count_zeros(codes.reshape(-1))
    empty = zeros >= codes.shape[1] and bool(_empty_rows(codes).any())
    return _CodeRows(zeros, empty, not largest <= torch.finfo(torch.float32).max)


def _empty_rows(codes: torch.Tensor) -> torch.Tensor:
    """Which rows of codes are all zero, of either sign."""
    bits = codes.view(torch.uint8)
    return (bits if codes.dtype == torch.int8 else bits << 1).amax(dim=1) == 0


def _count_code_rows(before: torch.Tensor, codes: torch.Tensor) -> _Counts:
    zero = (codes.to(before.device).to(torch.float32)) == 0
    values = before.to(torch.float32)  # the codes are made from float32 values, which may be infinite already
    # NaN has no code among integers and is kept as zero: that is no value lost.
    gone = zero & (before != 0) & ~torch.isnan(values)
    return _Counts(
        vanished=int(gone.sum()),
        channels=int((gone.any(dim=1) & _empty_rows(codes).to(before.device)).sum()),
        saturated=int(torch.isinf(values).sum()),
        nonfinite=before.numel() - int(torch.isfinite(before).sum()),
    )
