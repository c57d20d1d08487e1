"""Chooses scales and values of a weight by statistics of what it is multiplied with (`core.roundings`).

A weight is a matrix W, of which each row is multiplied with the inputs x of its layer. With H = E[x xᵀ], the mean squared error of
the layer's output is tr((Q - W) H (Q - W)ᵀ), where Q are the rounded values.

- `imatrix`: the scale of each block is the candidate with the smallest squared error, in which each input channel has the weight
  E[x²], the diagonal of H. The candidates are the scales of the largest |value| times a number of factors, each rounded as the
  format stores it. The factor 1 is among them, so the weighted error is never larger than that of the nearest value.
- `gptq`: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (2022). Channels are
  rounded one after the other, those with the largest E[x²] first, and the error of each is compensated in the channels that follow,
  as the Cholesky factor of H's inverse says. 1 % of the mean of its diagonal is added to H's diagonal before. The scales are those
  of `imatrix`, found before the first channel is rounded, so groups are as stored and a file needs no `g_idx`. If the result has a
  larger error than the nearest values have, a row keeps these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from dtype_engine.core import dtypes
from dtype_engine.core.block_formats import Blocks, matrices, scale_grid
from dtype_engine.core.dtypes import DType
from dtype_engine.core.roundings import FEWEST_TOKENS, ROUNDINGS, scale_factors
from dtype_engine.runtime.formats import fp8_blocks, grouped_ints, llama_blocks, mx, nvfp4
from dtype_engine.runtime.formats.blocks import spread
from dtype_engine.runtime.formats.code_packing import round_to_float
from dtype_engine.runtime.formats.row_blocks import finite_amax
from dtype_engine.runtime.formats.scales import Scales, amax_to_scale
from dtype_engine.runtime.numerics.quantize import cast_or_quantize

_DAMPING = 0.01
_VALUES_AT_ONCE = 1 << 25
"""About how many values of a matrix are rounded at once: with the arithmetic, they take about 1 GB."""
_CHANNELS_AT_ONCE = 128
"""The number of channels after which GPTQ applies the collected compensation to all channels that follow."""


@dataclass(frozen=True, slots=True)
class InputStatistics:
    """What is known of the inputs of a layer."""

    squares: torch.Tensor
    """The mean of x² for each input channel, float32 [channels]."""
    products: torch.Tensor | None
    """The mean of x xᵀ, float32 [channels, channels], or None if only the squares are known."""
    tokens: int
    """The number of inputs, such as tokens, over which the means are."""
    factor: tuple[torch.Tensor, torch.Tensor] | None = None
    """What GPTQ computes of the products (`_inverse_factor`), if several parts of a weight need it. None to compute it anew."""

    @property
    def sums(self) -> torch.Tensor:
        """The sum of x² for each input channel, float32 [channels], as a file of llama.cpp's imatrix has it."""
        return self.squares * self.tokens


@dataclass(frozen=True, slots=True)
class WeightStatistics:
    """The statistics of the inputs that a weight is multiplied with."""

    across: int
    """The dimension of the input channels in each matrix of the weight: 1 for `nn.Linear`, 0 for one stored the other way round."""
    parts: Mapping[int | None, InputStatistics]
    """By the index of the weight's first dimension, such as an expert's number. The key is None for a weight of two dimensions."""

    def at(self, index: int) -> WeightStatistics:
        """Return the statistics of a weight that holds only what this one has at one index of its first dimension."""
        return WeightStatistics(self.across, {0: self.parts[index]} if index in self.parts else {})


@dataclass(frozen=True, slots=True)
class Rounded:
    """A matrix after rounding."""

    values: torch.Tensor
    """Values of the format, float32 [rows, width]: the nearest code of each, under the scales, is exact."""
    scales: Scales


@dataclass(frozen=True, slots=True)
class RoundedCodes:
    """A weight in a format with a rounding."""

    codes: torch.Tensor
    """The codes in the weight's shape, as `numerics.quantize.cast_or_quantize` returns them."""
    scale: torch.Tensor
    """The scales by which the codes are multiplied, as `cast_or_quantize` returns them."""
    scales: Scales
    """The same scales with what a file stores: [blocks down, blocks across], or [channels, 1] for a scale for each channel."""
    nearest: tuple[int, ...] = ()
    """The indexes of the first dimension, such as those of experts, that got too few inputs and have the nearest codes."""

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes


def rounded_codes(tensor: torch.Tensor, dtype: str, given: WeightStatistics, amax: float | None = None) -> RoundedCodes:
    """Quantize a weight in a format with a rounding. dtype, given, amax: as for `round_weight`."""
    values, scales = round_weight(tensor, dtype, given, amax)
    codes, scale = cast_or_quantize(values, dtype, amax, scales)
    assert scale is not None
    fewest = FEWEST_TOKENS if dtypes.BY_NAME[dtype].llama is None else 1
    known = {index for index, each in given.parts.items() if each.tokens >= fewest}
    nearest = tuple(sorted(set(range(len(tensor))) - known)) if tensor.ndim > 2 else ()
    return RoundedCodes(codes, scale, scales, nearest)


def round_weight(
    tensor: torch.Tensor, dtype: str, given: WeightStatistics, amax: float | None = None
) -> tuple[torch.Tensor, Scales]:
    """Round a weight in a format with a rounding. Returns (values of the format, float32 in the weight's shape; the scales of its
    blocks or channels), from which the nearest codes are exact. A matrix of which too few inputs are known, such as an expert that
    got no token, and one with values that are not finite get the nearest values.

    amax: the |value| from which the tensor scale of a format that has one is computed; by default, the largest finite |value|.
    """
    element = dtypes.BY_NAME[dtype]
    if element.llama is not None:
        return _by_llama(tensor, dtype, given)
    count, height, width = matrices(
        tensor.shape, element.blocks.columns if element.blocks is not None else tensor.shape[-1]
    )
    rows = tensor.reshape(count, height, width)
    of_tensor = None
    if element.blocks is not None and element.blocks.tensor_scale:
        of_tensor = nvfp4.tensor_scale(torch.tensor(finite_amax(tensor) if amax is None else amax)).to(tensor.device)
    # Experts whose rows are shorter than a block are one matrix in the format, for which no inputs are known.
    parts = given.parts if tensor.ndim < 3 or rows.shape == tensor.shape else {}
    # A weight of several matrices has a scale for each of these in a format with a scale for each channel.
    channels = Blocks(height if tensor.ndim > 2 else 1, width, "float32")
    form = Format(element, element.blocks or channels, of_tensor)
    values = torch.empty(rows.shape, device=tensor.device)
    scales = []
    for index in range(count):
        wide = rows[index].float()
        statistics = parts.get(index if tensor.ndim > 2 else None)
        few = statistics is None or (tensor.ndim > 2 and statistics.tokens < FEWEST_TOKENS)
        if statistics is None or few or not bool(torch.isfinite(wide).all()):
            made = Rounded(wide, nearest_scales(wide, form))
        else:
            made = _round_matrix(wide, form, statistics, given.across)
        values[index] = made.values
        scales.append(made.scales)
    return values.view(tensor.shape), _joined(scales)


def _by_llama(tensor: torch.Tensor, dtype: str, given: WeightStatistics) -> tuple[torch.Tensor, Scales]:
    """Round a weight as llama-quantize does with an imatrix of these statistics. An expert that got no token counts all channels
    the same. Returns values, and scales of 1.
    """
    width = tensor.shape[-1]
    values = torch.empty(tensor.shape, device=tensor.device)
    for index, part in enumerate(tensor[None] if tensor.ndim < 3 else tensor):
        statistics = given.parts.get(None if tensor.ndim < 3 else index)
        weights = None  # with `across` 0, the channels are rows, not values of a block
        if given.across == 1:
            weights = torch.ones(width) if statistics is None else statistics.sums / statistics.tokens
        (values if tensor.ndim < 3 else values[index]).copy_(llama_blocks.rounded(part, dtype, weights))
    one = values.new_ones(1)
    return values, Scales(one, one)


@dataclass(frozen=True, slots=True)
class Format:
    """A format as a matrix has it."""

    element: DType
    blocks: Blocks
    """The values that share a scale. A format with a scale for each channel has blocks of one row."""
    of_tensor: torch.Tensor | None = None
    """The scale of the whole tensor, if the format has one."""


def nearest_scales(values: torch.Tensor, form: Format) -> Scales:
    finite = torch.nan_to_num(values, 0.0, 0.0, 0.0)
    return _scales(_reduced(finite, form.blocks, "amin"), _reduced(finite, form.blocks, "amax"), form)


def _joined(scales: Sequence[Scales]) -> Scales:
    zeros = [each.zero for each in scales if each.zero is not None]
    effective, stored = (torch.cat([getattr(each, name) for each in scales]) for name in ("effective", "stored"))
    return Scales(effective, stored, torch.cat(zeros) if zeros else None)


def round_matrix(
    values: torch.Tensor, dtype: str, given: InputStatistics, across: int, of_tensor: torch.Tensor | None = None
) -> Rounded:
    """Round a matrix in a format with a rounding. Only finite values are allowed.

    values: float32 [rows, width], as the format stores it. dtype: a name in `core.dtypes` with a rounding. across: the dimension of
    the input channels: 1 for a weight of `nn.Linear`, 0 for one that is stored the other way round, as in GPT-2. of_tensor: the
    scale of the whole tensor, if the format has one.
    """
    element = dtypes.BY_NAME[dtype]
    blocks = element.blocks or Blocks(1, values.shape[1], "float32")
    return _round_matrix(values, Format(element, blocks, of_tensor), given, across)


def _round_matrix(values: torch.Tensor, form: Format, given: InputStatistics, across: int) -> Rounded:
    """Round a matrix, some rows at a time if it is large, so that the arithmetic takes little more memory than the result."""
    rounding, step = form.element.rounding, max(1, _VALUES_AT_ONCE // values.shape[1])
    if len(values) <= step or not _rows_apart(form, across):
        return ROUNDERS[rounding](values, form, given, across)
    if ROUNDINGS[rounding].needs == "products" and given.products is not None:
        given = replace(given, factor=_inverse_factor(given.products))
    parts = (values[start : start + step] for start in range(0, len(values), step))
    made = [ROUNDERS[rounding](part, form, given, across) for part in parts]
    return Rounded(torch.cat([each.values for each in made]), _joined([each.scales for each in made]))


def _rows_apart(form: Format, across: int) -> bool:
    """Return whether what one row of a matrix gets does not depend on other rows."""
    return across == 1 and form.blocks.rows == 1


def _by_squares(values: torch.Tensor, form: Format, given: InputStatistics, across: int) -> Rounded:
    squares = given.squares.clamp(min=0) if bool(given.squares.any()) else torch.ones_like(given.squares)
    scales = _best_scales(values, form, squares[:, None] if across == 0 else squares)
    return Rounded(_Grid(form, scales, values.shape).nearest(values), scales)


def _compensated(values: torch.Tensor, form: Format, given: InputStatistics, across: int) -> Rounded:
    by_squares = _by_squares(values, form, given, across)
    if given.products is None:
        return by_squares
    scales = by_squares.scales
    factor = given.factor or _inverse_factor(given.products)
    made = Rounded(_gptq(values, _Grid(form, scales, values.shape), factor, across), scales)
    rows_apart = _rows_apart(form, across)
    plain = nearest_scales(values, form)
    for other in (by_squares, Rounded(_Grid(form, plain, values.shape).nearest(values), plain)):
        made = _lower_error(values, made, other, given.products, across, rows_apart)
    return made


def output_error(difference: torch.Tensor, products: torch.Tensor, across: int = 1) -> torch.Tensor:
    """Return the squared error of each of a layer's outputs, float32 [outputs]: the diagonal of D H Dᵀ.

    difference: the rounded weight minus the weight, D, float32 [rows, width]. products: H, float32 [channels, channels]. across: as
    for `round_matrix`.
    """
    of_outputs = difference if across == 1 else difference.T
    return ((of_outputs @ products) * of_outputs).sum(1)


def _lower_error(
    values: torch.Tensor, one: Rounded, other: Rounded, products: torch.Tensor, across: int, rows_apart: bool
) -> Rounded:
    """Return what has the lower error: row by row, or of the whole matrix if its rows are input channels or share scales. With very
    few inputs, compensation may have the larger one.
    """
    mine, theirs = (output_error(each.values - values, products, across) for each in (one, other))
    if not rows_apart:
        return other if mine.sum() > theirs.sum() else one
    rows = (mine > theirs)[:, None]
    scales = _chosen(rows, other.scales, one.scales)
    return Rounded(torch.where(rows, other.values, one.values), scales)


def _chosen(where: torch.Tensor, ones: Scales, others: Scales) -> Scales:
    """Return the scales `ones` where a condition is true, and `others` where it is false."""
    stored = torch.where(where, ones.stored.float(), others.stored.float()).to(others.stored.dtype)
    zero = None if ones.zero is None or others.zero is None else torch.where(where, ones.zero, others.zero)
    return Scales(torch.where(where, ones.effective, others.effective), stored, zero)


class _Grid:
    """The values that a matrix may have under given scales, element by element."""

    def __init__(self, form: Format, scales: Scales, shape: torch.Size) -> None:
        rows, width = shape
        self.element = form.element
        self.scale = spread(scales.effective, form.blocks, rows, width)
        self.zero = None if scales.zero is None else spread(scales.zero.float(), form.blocks, rows, width)

    def nearest(self, values: torch.Tensor, part: tuple[slice, int] | None = None) -> torch.Tensor:
        """Return the nearest values of the format. part: the indexes in the matrix of what `values` are, or None for all of it."""
        scale = self.scale if part is None else self.scale[part]
        zero = self.zero if part is None or self.zero is None else self.zero[part]
        return _units(values / scale, zero, self.element) * scale


def _units(scaled: torch.Tensor, zero: torch.Tensor | None, element: DType) -> torch.Tensor:
    """Return values divided by their scale, rounded to the codes of a format, without zero points."""
    if element.kind == "float":
        clamped = scaled.clamp(-element.max, element.max)
        return round_to_float(clamped, element, torch.empty_like(clamped), torch.empty_like(clamped))
    if element.blocks is None:
        return scaled.clamp(-element.max, element.max).round()
    least, most = grouped_ints.code_range(element)
    if zero is None:
        return scaled.clamp(least, most).round()
    return (scaled + zero).clamp(least, most).round() - zero


def _best_scales(values: torch.Tensor, form: Format, weights: torch.Tensor) -> Scales:
    """Return the scale of each block with the smallest squared error. weights: what each error counts, which is broadcast."""
    blocks = form.blocks
    low, high = (_reduced(values, blocks, how) for how in ("amin", "amax"))
    best, least = None, torch.empty(0)
    for factor in sorted(scale_factors(blocks.scale), key=lambda factor: factor != 1):
        scales = _scales(low * factor, high * factor, form)
        error = (_Grid(form, scales, values.shape).nearest(values) - values).square_().mul_(weights)
        errors = _reduced(error, blocks, "sum")
        if best is None:
            best, least = scales, errors
            continue
        better = errors < least
        least = torch.where(better, errors, least)
        best = _chosen(better, scales, best)
    assert best is not None
    return best


def _reduced(values: torch.Tensor, blocks: Blocks, how: str) -> torch.Tensor:
    """Return the sum, the smallest or the largest value of each block: float32 [blocks down, blocks across]."""
    rows, width = values.shape
    down, across = scale_grid(values.shape, blocks)
    whole = values.new_zeros(down * blocks.rows, across * blocks.columns)
    whole[:rows, :width] = values  # zeros at the edges change none of the three, since ranges include 0
    reduced: torch.Tensor = getattr(whole.view(down, blocks.rows, across, blocks.columns), how)(dim=(1, 3))
    return reduced


def _scales(low: torch.Tensor, high: torch.Tensor, form: Format) -> Scales:
    """Return the scales of blocks whose values lie between `low` and `high`."""
    element = form.element
    if form.blocks.zero_points:
        return grouped_ints.asymmetric(low.clamp(max=0), high.clamp(min=0), element)
    amax = torch.maximum(-low, high)
    if element.blocks is None:
        scale = amax_to_scale(amax, element.max)
        return Scales(scale, scale)
    if form.of_tensor is not None:
        return nvfp4.scales(amax, form.of_tensor)
    if element.kind == "int":
        return grouped_ints.symmetric(amax, element)
    return (
        fp8_blocks.scales(amax, element) if form.blocks.scale != "uint8" else mx.scales(amax, element, form.blocks.rule)
    )


def _gptq(values: torch.Tensor, grid: _Grid, factor: tuple[torch.Tensor, torch.Tensor], across: int) -> torch.Tensor:
    """Return rounded values in which each channel's error is compensated in the channels that are rounded after it. factor: as
    `_inverse_factor` returns it.
    """
    inverse, order = factor
    left = (values if across == 1 else values.T)[:, order].clone()
    result = torch.empty_like(left)
    count = len(order)
    for start in range(0, count, _CHANNELS_AT_ONCE):
        stop = min(start + _CHANNELS_AT_ONCE, count)
        columns = left[:, start:stop].T.contiguous()
        errors = torch.empty_like(columns)
        among = inverse[start:stop, start:stop]
        for number, channel in enumerate(order[start:stop].tolist()):
            part = (slice(None), channel) if across == 1 else (channel, slice(None))
            rounded = grid.nearest(columns[number], part)  # type: ignore[arg-type]
            result[:, start + number] = rounded
            errors[number] = (columns[number] - rounded) / among[number, number]
            columns[number + 1 :].addr_(among[number, number + 1 :], errors[number], alpha=-1)
        left[:, stop:] -= errors.T @ inverse[start:stop, stop:]
    result = result[:, torch.argsort(order)]
    return result if across == 1 else result.T.contiguous()


def _inverse_factor(products: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the upper Cholesky factor of the damped H's inverse, the order of its channels: the largest diagonal first)."""
    diagonal = products.diagonal().clone()
    diagonal[diagonal == 0] = 1.0  # a channel that is always zero, whose error costs nothing
    order = torch.argsort(diagonal, descending=True, stable=True)
    damped = products[order[:, None], order]
    damped.diagonal().copy_(diagonal[order] + _DAMPING * products.diagonal().mean())
    factor = torch.linalg.cholesky(damped)
    del damped  # H of a large layer takes much of the memory
    return torch.linalg.cholesky(torch.cholesky_inverse(factor), upper=True), order


ROUNDERS: dict[str, Callable[[torch.Tensor, Format, InputStatistics, int], Rounded]] = {
    "imatrix": _by_squares,
    "gptq": _compensated,
}
"""How each rounding of `core.roundings` rounds a matrix: a function of (values, format, statistics of the inputs, the dimension of
the input channels).
"""
