"""Computes the effect of a cast on the values of a tensor, without a forward pass: the round-trip error, and the histogram of
exponents.

A tensor is read once, some elements at a time, which stay in the processor's cache, so memory use does not grow with the tensor. If
each output channel has its own scale, whole rows are read at once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch

from dtype_engine.core import dtypes
from dtype_engine.core.block_formats import matrices
from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import Cancelled
from dtype_engine.core.llama_types import llama_type
from dtype_engine.results.weights import ExponentHistogram, WeightError
from dtype_engine.runtime.formats.blocks import BlockWork, Chunk
from dtype_engine.runtime.formats.dequantize import Workspace, dequantize_block
from dtype_engine.runtime.formats.quantize_blocks import quantize_chunks
from dtype_engine.runtime.formats.row_blocks import (
    as_rows,
    finite_amax,
    parallel_map,
    row_amax,
    row_slices,
    single_intraop_thread,
)
from dtype_engine.runtime.formats.scales import amax_to_scale
from dtype_engine.runtime.numerics.compare.metrics import relative_l2, sqnr_db
from dtype_engine.runtime.numerics.overflow_underflow import count_zeroed_nan, count_zeros, magnitude_bits
from dtype_engine.runtime.numerics.quantize import cast_or_quantize, quantize_block, saturates_beyond


def round_trip(name: str, tensor: torch.Tensor, dtype: str, cancelled: IsCancelled = never) -> WeightError:
    """Return the error of casting a tensor to `dtype` and back. Raises Cancelled."""
    found: list[tuple[int, _Sums]] = []  # appended to from several threads

    def add(first: int, x: torch.Tensor, cast: torch.Tensor, delta: torch.Tensor) -> None:
        if cancelled():
            raise Cancelled
        found.append((first, _sums(x.reshape(-1), cast.reshape(-1), delta.reshape(-1), dtype)))

    of_llama = _of_llama if llama_type(dtype) is not None else None
    (of_llama or (_in_blocks if dtype in dtypes.BLOCK_FORMATS else _in_pieces))(tensor, dtype, add)
    parts = [part for _, part in sorted(found, key=lambda each: each[0])]
    sums = _Sums(*map(sum, zip(*parts, strict=True)))
    sums = sums._replace(largest=max((part.largest for part in parts), default=0.0))
    return WeightError(
        name=name,
        stored=str(tensor.dtype).removeprefix("torch."),
        dtype=dtype,
        elements=tensor.numel(),
        mean_abs=sums.total / max(1, tensor.numel()),
        max_abs=sums.largest,
        rel_l2=relative_l2(sums.energy, sums.noise),
        sqnr_db=_reported(sqnr_db(sums.energy, sums.noise), sums),
        overflowed=sums.overflowed,
        saturated=sums.saturated,
        underflowed=sums.underflowed,
        subnormal=sums.subnormal,
        nonfinite=sums.nonfinite,
    )


_BEST_DB = 200.0
"""An SQNR in dB that rounding can't reach: rounding to float32 gives 146 dB (6.02 for each of 24 bits, plus 1.76)."""


def _reported(sqnr: float, sums: _Sums) -> float | None:
    """Return the SQNR of a cast in dB, or None if this number would be misleadingly good, because some stored values are not
    finite, or because nearly all of the error comes from tiny values that became zero.
    """
    flattering = sums.nonfinite or (sums.underflowed and sqnr > _BEST_DB)
    return None if flattering and sqnr > -math.inf else sqnr


class _Sums(NamedTuple):
    """Sums and counts over some elements of a tensor, as in `WeightError`, and the largest error among them."""

    noise: float = 0.0
    energy: float = 0.0
    total: float = 0.0
    largest: float = 0.0
    overflowed: int = 0
    saturated: int = 0
    underflowed: int = 0
    subnormal: int = 0
    nonfinite: int = 0


OnPiece = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Called with some successive rows or elements of a tensor, in several threads: the index of the first; their values (float32 or
float64); the values after the cast, or the codes for a dtype with scales; and the errors. The tensors are only valid during the
call.
"""


def _in_pieces(tensor: torch.Tensor, dtype: str, on_piece: OnPiece) -> None:
    quantized = dtype in dtypes.STORAGE_DTYPES
    several = quantized and tensor.ndim >= 2 and not dtypes.BY_NAME[dtype].per_tensor
    rows = as_rows(tensor, dtype) if several else tensor.reshape(-1)
    pieces, top = row_slices(rows), dtypes.BY_NAME[dtype].max
    of_all = amax_to_scale(torch.tensor([finite_amax(tensor)]), top) if quantized and not several else None
    wide = torch.float64 if tensor.dtype == torch.float64 or dtype == "float64" else torch.float32

    def work(numbers: Iterable[int]) -> None:
        shape = rows[pieces[0]].shape
        buffers = Workspace.like(shape, dtype, torch.float32 if quantized else wide)
        x_buffer = torch.empty(shape, dtype=wide) if tensor.dtype != wide else None
        for piece in map(pieces.__getitem__, numbers):
            part = rows[piece]
            x = part if x_buffer is None else x_buffer[: len(part)].copy_(part)
            workspace = buffers.first(len(part))
            if quantized:
                values = x.to(torch.float32)
                scale = amax_to_scale(row_amax(values), top)[:, None] if of_all is None else of_all
                dequantize_block(quantize_block(values, scale, dtype, workspace), scale, workspace)
            else:
                workspace.values.copy_(workspace.cast.copy_(x))
            on_piece(piece.start, x, workspace.cast, workspace.values.to(wide).sub_(x))

    parallel_map(work, len(pieces))


def _in_blocks(tensor: torch.Tensor, dtype: str, on_piece: OnPiece) -> None:
    blocks = dtypes.BY_NAME[dtype].blocks
    assert blocks is not None
    count, height, width = matrices(tensor.shape, blocks.columns)
    rows = tensor.reshape(count * height, width)

    def take(work: BlockWork, chunk: Chunk) -> None:
        x = chunk.values
        if tensor.dtype == torch.float64:
            x = rows[chunk.first : chunk.first + len(x)]
        on_piece(chunk.first, x, chunk.units, work.dequantize(chunk).to(x.dtype).sub_(x))

    quantize_chunks(tensor, dtype, take)


def _of_llama(tensor: torch.Tensor, dtype: str, on_piece: OnPiece) -> None:
    values, flat = cast_or_quantize(tensor, dtype)[0].reshape(-1), tensor.reshape(-1)
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    for piece in row_slices(flat):
        x = flat[piece].to(wide)
        on_piece(piece.start, x, values[piece], values[piece] - x)


def _sums(x: torch.Tensor, cast: torch.Tensor, delta: torch.Tensor, dtype: str) -> _Sums:
    """Return the sums over some elements of a tensor. x, cast, delta: the values, the result of the cast and the errors, as for
    `OnPiece`, but flat. delta is overwritten.
    """
    noise, energy = float(torch.dot(delta, delta)), float(torch.dot(x, x))
    overflowed = saturated = nonfinite = zeroed_nan = 0
    limit = saturates_beyond(dtype) if dtype in dtypes.STORAGE_DTYPES else math.inf
    if not (math.isfinite(noise) and energy <= limit**2):
        # Dequantized values are not kept, but the error of a finite value is finite if and only if the dequantized value is.
        before = torch.isfinite(x)
        after = torch.isfinite(cast.to(x.dtype))
        back = torch.isfinite(delta)
        overflowed = int((before & ~back).sum())
        saturated = int((after & (torch.isinf(x) | (x.to(torch.float32).abs() > limit))).sum())
        nonfinite = int((~before).sum())
        zeroed_nan = count_zeroed_nan(x, dtype)
        delta = delta[before & back]
        noise = math.inf if overflowed else float(delta.double().square().sum())
        energy = float(x[before].double().square().sum())
    total = largest = math.inf if overflowed else 0.0
    if noise and delta.numel():
        delta.abs_()
        total += float(delta.sum())
        largest = max(largest, float(delta.amax()))
    bits, row = magnitude_bits(cast), dtypes.BY_NAME[dtype]
    zeros = bits.size - int(np.count_nonzero(bits))
    subnormal = 0
    if row.kind == "float":
        least_normal = magnitude_bits(torch.tensor([row.tiny], dtype=torch.float64).to(cast.dtype))
        subnormal = int(np.count_nonzero(bits < least_normal)) - zeros
    underflowed = zeros - count_zeros(x) - zeroed_nan if zeros else 0
    return _Sums(noise, energy, total, largest, overflowed, saturated, underflowed, subnormal, nonfinite)


@single_intraop_thread()
def exponents(name: str, tensor: torch.Tensor, cancelled: IsCancelled = never) -> ExponentHistogram:
    """Return how many values have each exponent floor(log2 |x|), are zero, or are not finite. Raises Cancelled."""
    counts = Counter[int]()
    zeros = nonfinite = 0
    flat = tensor.reshape(-1)
    for piece in row_slices(flat):
        if cancelled():
            raise Cancelled
        part = flat[piece].to(torch.float64 if tensor.dtype == torch.float64 else torch.float32)
        finite = torch.isfinite(part)
        nonfinite += part.numel() - int(finite.sum())
        part = part[finite]
        part = part[part != 0]
        zeros += int(finite.sum()) - part.numel()
        if not part.numel():
            continue
        # The fraction that frexp gives lies between 0.5 and 1, so its exponent is one more than floor(log2).
        powers = torch.frexp(part).exponent.to(torch.int64) - 1
        low = int(powers.min())
        for power, count in enumerate(torch.bincount(powers - low).tolist(), low):
            if count:
                counts[power] += count
    return ExponentHistogram(name, tuple(sorted(counts.items())), zeros, nonfinite)
