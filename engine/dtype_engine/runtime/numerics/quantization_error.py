"""What a cast does to a tensor's values, without a forward pass: the round-trip error, and where its exponents lie.

A tensor is read once, in chunks that stay in the processor's cache, so memory does not grow with it; only scales per output
channel need a chunk to hold whole rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from dtype_engine.core import dtypes
from dtype_engine.core.block_formats import matrices
from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import Cancelled
from dtype_engine.results.weights import ExponentHistogram, WeightError
from dtype_engine.runtime.formats.blocks import BlockWork, Chunk
from dtype_engine.runtime.formats.quantize_blocks import quantize_chunks
from dtype_engine.runtime.formats.row_blocks import parallel_map, single_intraop_thread
from dtype_engine.runtime.numerics.compare.metrics import sqnr_db
from dtype_engine.runtime.numerics.overflow_underflow import count_zeros
from dtype_engine.runtime.numerics.quantize import (
    Workspace,
    amax_to_scale,
    dequantize_block,
    finite_amax,
    quantize_block,
)

CHUNK = 1 << 19
"""Elements of a chunk: 2 MiB in float32, so that what is made of it stays in the cache, and Python's share stays small."""


def round_trip(name: str, tensor: torch.Tensor, dtype: str, cancelled: IsCancelled = never) -> WeightError:
    """The error of casting `tensor` to `dtype` and back; see `results.WeightError`. Raises Cancelled."""
    sums = _Sums()
    if dtype in dtypes.BLOCK_FORMATS:
        for part in _blocks(tensor, dtype, cancelled):
            sums.add(part)
    else:
        pieces = _Pieces(tensor, dtype)
        for part in parallel_map(partial(_measure, pieces, tensor.dtype, dtype, cancelled), len(pieces)):
            sums.add(part)
    return WeightError(
        name=name,
        stored=str(tensor.dtype).removeprefix("torch."),
        dtype=dtype,
        elements=tensor.numel(),
        mean_abs=sums.total / max(1, tensor.numel()),
        max_abs=sums.largest,
        rel_l2=0.0 if sums.noise == 0 else math.sqrt(sums.noise / sums.energy) if sums.energy else math.inf,
        sqnr_db=_reported(sqnr_db(sums.energy, sums.noise), sums),
        overflowed=sums.overflowed,
        saturated=sums.saturated,
        underflowed=sums.underflowed,
        subnormal=sums.subnormal,
        nonfinite=sums.nonfinite,
    )


_BEST_DB = 200.0
"""Rounding to float32 leaves 146 dB (6.02 for each of 24 bits and 1.76 more); what is far above has hardly an error but the
values that vanished.
"""


def _reported(sqnr: float, sums: _Sums) -> float | None:
    """A tensor's SQNR, None where the figure would flatter: see `results.WeightError`."""
    praise = sums.nonfinite or (sums.underflowed and sqnr > _BEST_DB)
    return None if praise and sqnr > -math.inf else sqnr


@dataclass(slots=True)
class _Sums:
    """What adds up over the pieces of a tensor."""

    noise: float = 0.0
    energy: float = 0.0
    total: float = 0.0
    largest: float = 0.0
    overflowed: int = 0
    saturated: int = 0
    underflowed: int = 0
    subnormal: int = 0
    nonfinite: int = 0

    def add(self, other: _Sums) -> None:
        largest = max(self.largest, other.largest)
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.largest = largest


class _Pieces:
    """A tensor in pieces: flat ones, or whole rows where each row has a scale of its own."""

    def __init__(self, tensor: torch.Tensor, dtype: str) -> None:
        quantized = dtype in dtypes.STORAGE_DTYPES
        self.scale: torch.Tensor | None = None
        """The one scale of all pieces, where there is one."""
        if quantized and dtypes.has_channel_scales(tensor.shape, dtype):
            self.tensor = tensor.reshape(tensor.shape[0], -1) if tensor.numel() else tensor.reshape(0, 1)
            self.step = max(1, CHUNK // self.tensor.shape[1])
            return
        self.tensor, self.step = tensor.reshape(-1), CHUNK
        if quantized:
            amax = parallel_map(self._largest, len(self))
            self.scale = amax_to_scale(torch.tensor([max(amax, default=0.0)]), dtypes.BY_NAME[dtype].max)

    def __len__(self) -> int:
        return -(-len(self.tensor) // self.step)

    def __getitem__(self, number: int) -> torch.Tensor:
        return self.tensor[number * self.step : (number + 1) * self.step]

    def _largest(self, numbers: range) -> float:
        return max(float(finite_amax(self[number][None].to(torch.float32))) for number in numbers)


def _measure(pieces: _Pieces, stored: torch.dtype, dtype: str, cancelled: IsCancelled, numbers: range) -> _Sums:
    """The sums over some of the pieces, in buffers of their own. Raises Cancelled."""
    wide = torch.float64 if stored == torch.float64 or dtype == "float64" else torch.float32
    shape = pieces[numbers[0]].shape
    buffers = Workspace.like(shape, dtype, wide)
    x_buffer = torch.empty(shape, dtype=wide) if stored != wide else None
    sums = _Sums()
    for number in numbers:
        if cancelled():
            raise Cancelled
        part = pieces[number]
        x = part if x_buffer is None else x_buffer[: len(part)].copy_(part)
        _measure_piece(x, dtype, pieces.scale, buffers.first(len(part)), sums)
    return sums


def _blocks(tensor: torch.Tensor, dtype: str, cancelled: IsCancelled) -> list[_Sums]:
    """The sums over the chunks of a tensor in a format with blocks. Raises Cancelled."""
    element = dtypes.BY_NAME[dtype]
    assert element.blocks is not None
    count, height, width = matrices(tensor.shape, element.blocks.columns)
    rows = tensor.reshape(count * height, width)
    found: list[tuple[int, _Sums]] = []  # appended to from several threads

    def measure(work: BlockWork, chunk: Chunk) -> None:
        if cancelled():
            raise Cancelled
        sums = _Sums()
        x, units = chunk.values, chunk.units
        if tensor.dtype == torch.float64:
            x = rows[chunk.first : chunk.first + len(units)]
        delta = work.dequantize(chunk).to(x.dtype).sub_(x)
        x, units, delta = x.reshape(-1), units.reshape(-1), delta.reshape(-1)
        _add_errors(x, units, delta, sums)
        _add_small_units(x, units, delta, element, sums)
        found.append((chunk.first, sums))

    quantize_chunks(tensor, dtype, measure, CHUNK)
    return [sums for _, sums in sorted(found, key=lambda each: each[0])]


def _measure_piece(x: torch.Tensor, dtype: str, scale: torch.Tensor | None, workspace: Workspace, sums: _Sums) -> None:
    """Adds the error of one piece, already in float32 or float64, to `sums`."""
    if dtype in dtypes.STORAGE_DTYPES:
        if scale is None:
            amax = finite_amax(x.to(torch.float32))
            scale = amax_to_scale(amax, dtypes.BY_NAME[dtype].max)[:, None]
        if x.dtype == torch.float32:
            dequantize_block(quantize_block(x, scale, dtype, workspace), scale, workspace)
        else:
            workspace.values.copy_(
                dequantize_block(workspace.cast.copy_(quantize_block(x.to(torch.float32), scale, dtype)), scale)
            )
    else:
        workspace.cast.copy_(x)
        workspace.values.copy_(workspace.cast)
    x, cast, delta = x.view(-1), workspace.cast.view(-1), workspace.values.sub_(x).view(-1)
    _add_errors(x, cast, delta, sums)
    small, gone = _small(x, cast, dtype, workspace)
    sums.subnormal += small
    sums.underflowed += gone


def _add_errors(x: torch.Tensor, cast: torch.Tensor, delta: torch.Tensor, sums: _Sums) -> None:
    """Adds the error `delta` of flat values `x`, which the cast made `cast`, to `sums`. `delta` is free memory afterwards."""
    noise, energy = float(torch.dot(delta, delta)), float(torch.dot(x, x))
    if not (math.isfinite(noise) and math.isfinite(energy)):
        # What came back is not kept beside its error: the error of a finite value is finite just where it is.
        before = torch.isfinite(x)
        after = torch.isfinite(cast.to(x.dtype))
        back = torch.isfinite(delta)  # the largest float32 may come back from a code and its scale as infinite
        lost = int((before & ~back).sum())
        sums.overflowed += lost
        sums.saturated += int((torch.isinf(x) & after).sum())
        sums.nonfinite += int((~before).sum())
        delta = delta[before & back]
        noise = math.inf if lost else float(delta.double().square().sum())
        energy = float(x[before].double().square().sum())
        sums.total, sums.largest = (math.inf, math.inf) if lost else (sums.total, sums.largest)
    sums.noise += noise
    sums.energy += energy
    if noise and delta.numel():
        delta.abs_()
        sums.total += float(delta.sum())
        sums.largest = max(sums.largest, float(delta.amax()))


def _add_small_units(
    x: torch.Tensor, units: torch.Tensor, spare: torch.Tensor, element: dtypes.DType, sums: _Sums
) -> None:
    """Adds what became subnormal or zero in a format with blocks, by what its codes stand for before the scale."""
    zeros = count_zeros(units)
    if zeros:
        sums.underflowed += zeros - count_zeros(x)
        if element.bits < 8 or element.kind == "int":  # NaN has no code there and is kept as zero
            sums.underflowed -= int(torch.isnan(x).sum())
    if element.kind == "float":
        magnitudes = torch.abs(units, out=spare.view(torch.float32)[: units.numel()])
        small = magnitudes < element.tiny
        sums.subnormal += int(np.count_nonzero(small.cpu().numpy())) - zeros


_BITS = {
    1: (torch.uint8, 0x7F),
    2: (torch.int16, 0x7FFF),
    4: (torch.int32, 0x7FFFFFFF),
    8: (torch.int64, (1 << 63) - 1),
}


def _small(x: torch.Tensor, cast: torch.Tensor, dtype: str, workspace: Workspace) -> tuple[int, int]:
    """Values that become subnormal, and values that become zero. Those that were zero are neither.

    Read off the bits: without its sign, a float whose exponent field is empty is subnormal or zero.
    """
    row = dtypes.BY_NAME[dtype]
    if row.kind != "float":
        zeros_after = cast.numel() - int(torch.count_nonzero(cast))
        # NaN has no code among integers and is kept as zero: that is no underflow.
        nan = int(torch.isnan(x).sum()) if zeros_after else 0
        return 0, zeros_after - nan - (x.numel() - int(torch.count_nonzero(x))) if zeros_after else 0
    view, mask = _BITS[cast.element_size()]
    # The dequantized values are not needed any more: their memory is free for the bits.
    bits = torch.bitwise_and(cast.view(view), mask, out=workspace.bits(cast.numel(), view))
    least = int(bits.amin())
    if least >> row.mantissa:
        return 0, 0
    zeros = bits.numel() - _nonzero(bits) if least == 0 else 0
    below = bits.numel() - _nonzero(bits.bitwise_right_shift_(row.mantissa))
    if not zeros:
        return below, 0
    # Looking for the smallest is two passes, and takes half as long as counting zeros in float32.
    lowest = float(torch.abs(x, out=workspace.values.view(-1)).amin())
    zeros_before = 0 if lowest > 0 else x.numel() - int(torch.count_nonzero(x))
    return below - zeros, zeros - zeros_before


_LANE, _GROUP = 8, 128


def _nonzero(bits: torch.Tensor) -> int:
    """How many of flat integers, none of them negative, are not zero. torch counts one at a time; of bytes, eight are added at once
    here, in groups so small that no byte runs over, which takes a third of the time.
    """
    if bits.dtype != torch.uint8:
        return int(torch.count_nonzero(bits))
    whole = bits.numel() - bits.numel() % (_LANE * _GROUP)
    groups = torch.clamp(bits[:whole], max=1).view(torch.int64).view(-1, _GROUP).sum(dim=1)
    return int(groups.view(torch.uint8).sum()) + int(torch.count_nonzero(bits[whole:]))


@single_intraop_thread()
def exponents(name: str, tensor: torch.Tensor, cancelled: IsCancelled = never) -> ExponentHistogram:
    """How many values lie in each power of two: floor(log2 |x|). Zeros and what is not finite are counted apart."""
    counts: dict[int, int] = {}
    zeros = nonfinite = 0
    flat = tensor.reshape(-1)
    for start in range(0, flat.numel(), CHUNK):
        if cancelled():
            raise Cancelled
        part = flat[start : start + CHUNK].to(torch.float64 if tensor.dtype == torch.float64 else torch.float32)
        finite = torch.isfinite(part)
        nonfinite += part.numel() - int(finite.sum())
        part = part[finite]
        part = part[part != 0]
        zeros += int(finite.sum()) - part.numel()
        if not part.numel():
            continue
        # frexp gives a fraction from 0.5 to 1, so its exponent is one more than floor(log2).
        powers = torch.frexp(part).exponent.to(torch.int64) - 1
        low = int(powers.min())
        for power, count in enumerate(torch.bincount(powers - low).tolist(), low):
            if count:
                counts[power] = counts.get(power, 0) + count
    return ExponentHistogram(name, tuple(sorted(counts.items())), zeros, nonfinite)
