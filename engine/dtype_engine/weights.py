"""What a cast does to a tensor's values, without a forward pass: the round-trip error, and where its exponents lie.

A tensor is read once, in chunks that stay in the processor's cache, so memory does not grow with it; only scales per output
channel need a chunk to hold whole rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from . import dtypes
from .errors import Cancelled
from .metrics import sqnr_db
from .readings import ExponentHistogram, WeightError
from .storage import Scratch, from_codes, largest_finite, one_thread, scale_for, to_codes, torch_dtype

CHUNK = 1 << 18
"""Elements of a chunk: 1 MiB in float32, so that what is made of it stays in the cache."""


@one_thread()
def round_trip(
    name: str, tensor: torch.Tensor, dtype: str, cancelled: Callable[[], bool] = lambda: False
) -> WeightError:
    """The error of casting `tensor` to `dtype` and back; see `readings.WeightError`. Raises Cancelled."""
    wide = torch.float64 if tensor.dtype == torch.float64 or dtype == "float64" else torch.float32
    noise = energy = total = largest = 0.0
    overflowed = saturated = underflowed = subnormal = nonfinite = 0
    scratch: Scratch | None = None
    for part, scale in _chunks(tensor, dtype):
        if cancelled():
            raise Cancelled
        if wide == torch.float32 and scratch is None:
            scratch, magnitudes_of = Scratch.like(part, dtype), torch.empty(part.shape)
            wide_of = torch.empty(part.shape) if part.dtype != wide else None
        room = scratch.first(len(part)) if scratch is not None and part.ndim else None
        x = part.to(wide) if part.dtype == wide or room is None else wide_of[: len(part)].copy_(part)  # type: ignore[index]
        magnitudes = torch.abs(x, out=magnitudes_of[: len(part)]) if room is not None else x.abs()
        kept, back = _there_and_back(x, magnitudes, dtype, scale, wide, room)
        delta = (back.sub_(x) if room is not None else torch.sub(back, x)).view(-1)
        x = x.view(-1)
        chunk_noise, chunk_energy = float(torch.dot(delta, delta)), float(torch.dot(x, x))
        if not (math.isfinite(chunk_noise) and math.isfinite(chunk_energy)):
            # What came back is not kept beside its error: the error of a finite value is finite just where it is.
            before = torch.isfinite(x)
            after = torch.isfinite(kept.view(-1).to(wide))
            lost = int((before & ~after).sum())
            overflowed += lost
            saturated += int((torch.isinf(x) & after).sum())
            nonfinite += int((~before).sum())
            delta = delta[before & after]
            chunk_noise = math.inf if lost else float(delta.double().square().sum())
            chunk_energy = float(x[before].double().square().sum())
            total, largest = (math.inf, math.inf) if lost else (total, largest)
        noise, energy = noise + chunk_noise, energy + chunk_energy
        if delta.numel():
            delta.abs_()
            total += float(delta.sum())
            largest = max(largest, float(delta.max()))
        small, gone = _small(x, magnitudes, kept.view(-1), dtype)
        subnormal, underflowed = subnormal + small, underflowed + gone
    return WeightError(
        name=name,
        stored=str(tensor.dtype).removeprefix("torch."),
        dtype=dtype,
        elements=tensor.numel(),
        mean_abs=total / max(1, tensor.numel()),
        max_abs=largest,
        rel_l2=0.0 if noise == 0 else math.sqrt(noise / energy) if energy else math.inf,
        sqnr_db=sqnr_db(energy, noise),
        overflowed=overflowed,
        saturated=saturated,
        underflowed=underflowed,
        subnormal=subnormal,
        nonfinite=nonfinite,
    )


def _chunks(tensor: torch.Tensor, dtype: str) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Pieces of a tensor: flat ones, or whole rows where each has a scale; and the one scale of all, where there is one."""
    storage_only = dtype in dtypes.STORAGE_ONLY
    if storage_only and tensor.ndim >= 2 and not dtypes.BY_NAME[dtype].one_scale:
        rows = tensor.reshape(tensor.shape[0], math.prod(tensor.shape[1:]))
        step = max(1, CHUNK // max(1, rows.shape[1]))
        for start in range(0, rows.shape[0], step):
            yield rows[start : start + step], None
        return
    flat = tensor.reshape(-1)
    scale = None
    if storage_only:
        largest = torch.zeros(1)
        for start in range(0, flat.numel(), CHUNK):
            largest = torch.maximum(largest, largest_finite(flat[None, start : start + CHUNK].to(torch.float32).abs()))
        scale = scale_for(largest, dtypes.BY_NAME[dtype].max)
    for start in range(0, flat.numel(), CHUNK):
        yield flat[start : start + CHUNK], scale


def _there_and_back(
    x: torch.Tensor,
    magnitudes: torch.Tensor,
    dtype: str,
    scale: torch.Tensor | None,
    wide: torch.dtype,
    room: Scratch | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A chunk (flat, or rows) in `dtype`, and the same as values again, in `wide`."""
    if dtype not in dtypes.STORAGE_ONLY:
        if room is not None:
            return room.kept.copy_(x), room.values.copy_(room.kept)
        kept = x.to(torch_dtype(dtype))
        return kept, kept.to(wide)
    x = x.to(torch.float32)
    if scale is None:
        scale = scale_for(largest_finite(magnitudes.to(torch.float32)), dtypes.BY_NAME[dtype].max)[:, None]
    kept = to_codes(x, scale, dtype, room)
    return kept, from_codes(kept, scale, room).to(wide)


_BITS = {
    1: (torch.uint8, 0x7F),
    2: (torch.int16, 0x7FFF),
    4: (torch.int32, 0x7FFFFFFF),
    8: (torch.int64, (1 << 63) - 1),
}


def _small(x: torch.Tensor, magnitudes: torch.Tensor, kept: torch.Tensor, dtype: str) -> tuple[int, int]:
    """Values that become subnormal, and values that become zero. Those that were zero are neither.

    Read off the bits: without its sign, a float whose exponent field is empty is subnormal or zero.
    """
    row = dtypes.BY_NAME[dtype]
    view, mask = _BITS[kept.element_size()]
    if row.kind != "float":
        zeros_after = kept.numel() - int(torch.count_nonzero(kept))
        # NaN has no code among integers and is kept as zero: that is no underflow.
        nan = int(torch.isnan(x).sum()) if zeros_after else 0
        return 0, zeros_after - nan - (x.numel() - int(torch.count_nonzero(x))) if zeros_after else 0
    magnitude = kept.view(view) & mask
    below = magnitude.numel() - int(torch.count_nonzero(magnitude >> row.mantissa))
    if not below:
        return 0, 0
    zeros_after = magnitude.numel() - int(torch.count_nonzero(magnitude))
    zeros_before = x.numel() - int(torch.count_nonzero(x)) if zeros_after and not float(magnitudes.amin()) > 0 else 0
    return below - zeros_after, zeros_after - zeros_before


@one_thread()
def exponents(name: str, tensor: torch.Tensor, cancelled: Callable[[], bool] = lambda: False) -> ExponentHistogram:
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
        for place, count in enumerate(torch.bincount(powers - low).tolist()):
            if count:
                counts[low + place] = counts.get(low + place, 0) + count
    return ExponentHistogram(name, tuple(sorted(counts.items())), zeros, nonfinite)
