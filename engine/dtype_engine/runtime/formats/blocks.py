"""Quantizes some rows of a weight in a block format, which has a scale for each block of values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from dtype_engine.core.block_formats import Blocks, matrices
from dtype_engine.core.dtypes import DType
from dtype_engine.runtime.formats import fp8_blocks, grouped_ints, mx, nvfp4
from dtype_engine.runtime.formats.code_packing import round_to_float
from dtype_engine.runtime.formats.scales import Scales


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some consecutive rows of a weight, quantized. The rows of several matrices are numbered consecutively."""

    first: int
    """The index of the chunk's first row in the weight."""
    first_scale: int
    """The index of the chunk's first row of scales in the whole weight's grid."""
    values: torch.Tensor
    """The values before quantization: float32 [rows, width], in memory that the next chunk overwrites."""
    units: torch.Tensor
    """The quantized values divided by the scale, without zero points: float32 [rows, width]. The next chunk overwrites them."""
    scales: Scales

    def codes(self, element: DType) -> torch.Tensor:
        """Return the codes in the dtype that a running model keeps, float8_e4m3fn or int8: [rows, width]."""
        return self.units.to(getattr(torch, element.torch_name))

    def file_codes(self, element: DType) -> torch.Tensor:
        """Return the codes that a file stores, before packing: [rows, width]. Unlike `units`, they include the zero point."""
        if self.scales.zero is None or element.blocks is None:
            return self.codes(element)
        rows, width = self.units.shape
        zero = spread(self.scales.zero.to(torch.float32), element.blocks, rows, width)
        return (self.units + zero).to(torch.int8)


class BlockWork:
    """Quantizes a weight one chunk (some rows) after the other. It allocates its buffers once, for the largest chunk of `rows` x
    `width`. of_tensor: the scale of the whole tensor, if the format has one.
    """

    def __init__(
        self, element: DType, rows: int, width: int, of_tensor: torch.Tensor | None, device: torch.device | str = "cpu"
    ) -> None:
        assert element.blocks is not None
        self.element, self.blocks, self.width, self.of_tensor = element, element.blocks, width, of_tensor
        down, across = -(-rows // self.blocks.rows), -(-width // self.blocks.columns)
        shape = down * self.blocks.rows, across * self.blocks.columns
        self._values = torch.zeros(shape, device=device)
        self._scaled, self._units, self._spare = (torch.empty(shape, device=device) for _ in range(3))

    def quantize(
        self, source: torch.Tensor, first: int = 0, first_scale: int = 0, given: Scales | None = None
    ) -> Chunk:
        """Quantize some rows of the weight, of any float dtype. first, first_scale: the indexes of the first row, and of its row of
        scales, in the whole weight. given: the scales of these rows; by default, the finite values determine them. An infinity
        becomes the largest code. NaN stays NaN if the element type has NaN, and becomes 0 otherwise.
        """
        rows = len(source)
        self._values[:rows, : self.width].copy_(source)
        down = -(-rows // self.blocks.rows)
        padded = down * self.blocks.rows
        self._values[rows:padded] = 0.0
        values, scaled, units, spare = (
            each[:padded] for each in (self._values, self._scaled, self._units, self._spare)
        )
        scales = self._scales(values, spare) if given is None else given
        torch.div(self._in_blocks(values), scales.effective[:, None, :, None], out=self._in_blocks(scaled))
        if self.element.kind == "int":
            self._round_to_int(scaled, scales, units)
        else:
            scaled.clamp_(-self.element.max, self.element.max)
            if self.element.bits < 8:
                _drop_nan(scaled)
            round_to_float(scaled, self.element, spare, units)
        return Chunk(first, first_scale, values[:rows, : self.width], units[:rows, : self.width], scales)

    def dequantize(self, chunk: Chunk) -> torch.Tensor:
        """Return the values of `chunk`, which must be the last one quantized: float32 [rows, width]. The next chunk overwrites
        them.
        """
        down, rows = len(chunk.scales.effective), len(chunk.units)
        padded = down * self.blocks.rows
        out = self._scaled[:padded]
        torch.mul(
            self._in_blocks(self._units[:padded]), chunk.scales.effective[:, None, :, None], out=self._in_blocks(out)
        )
        return out[:rows, : self.width]

    def _in_blocks(self, values: torch.Tensor) -> torch.Tensor:
        """Return a matrix as a view [blocks down, rows of a block, blocks across, columns of a block]."""
        return values.view(-1, self.blocks.rows, values.shape[1] // self.blocks.columns, self.blocks.columns)

    def _scales(self, values: torch.Tensor, spare: torch.Tensor) -> Scales:
        if self.blocks.zero_points:
            low, high = self._in_blocks(values).amin(dim=(1, 3)), self._in_blocks(values).amax(dim=(1, 3))
            if not bool((torch.isfinite(low) & torch.isfinite(high)).all()):
                finite = self._in_blocks(torch.nan_to_num(values, 0.0, 0.0, 0.0))
                low, high = finite.amin(dim=(1, 3)), finite.amax(dim=(1, 3))
            return grouped_ints.asymmetric(low.clamp_(max=0), high.clamp_(min=0), self.element)
        torch.abs(values, out=spare)
        amax = self._largest(spare)
        if not bool(torch.isfinite(amax).all()):
            amax = self._largest(spare.nan_to_num_(0.0, 0.0, 0.0))
        if self.of_tensor is not None:
            return nvfp4.scales(amax, self.of_tensor)
        if self.element.kind == "int":
            return grouped_ints.symmetric(amax, self.element)
        if self.blocks.scale != "uint8":
            return fp8_blocks.scales(amax, self.element)
        return mx.scales(amax, self.element, self.blocks.rule)

    def _largest(self, magnitudes: torch.Tensor) -> torch.Tensor:
        """Return the largest magnitude in each block: float32 [blocks down, blocks across]. The bits of nonnegative floats, read as
        integers, have the same order, and torch reduces small groups of integers several times as fast.
        """
        return self._in_blocks(magnitudes).view(torch.int32).amax(dim=(1, 3)).view(torch.float32)

    def _round_to_int(self, scaled: torch.Tensor, scales: Scales, units: torch.Tensor) -> None:
        least, most = grouped_ints.code_range(self.element)
        _drop_nan(scaled)
        if scales.zero is None:
            torch.round(scaled.clamp_(least, most), out=units)
        else:
            shift = scales.zero.to(torch.float32)[:, None, :, None]
            self._in_blocks(scaled).add_(shift)
            torch.round(scaled.clamp_(least, most), out=units)
            self._in_blocks(units).sub_(shift)
        if (limit := grouped_ints.code_limit(scales, self.element)) is not None:
            bound = limit[:, None, :, None]
            blocks = self._in_blocks(units)
            torch.maximum(torch.minimum(blocks, bound, out=blocks), -bound, out=blocks)


def _drop_nan(values: torch.Tensor) -> None:
    """Replace each NaN by 0 in place. To save time, the values are searched only if their sum is NaN."""
    if bool(torch.isnan(values.sum())):
        values.nan_to_num_(0.0)


def spread(scales: torch.Tensor, blocks: Blocks, rows: int, width: int) -> torch.Tensor:
    """Repeat the scales [blocks down, blocks across] for all elements of their blocks, cut off to [rows, width]."""
    return scales.repeat_interleave(blocks.rows, dim=0)[:rows].repeat_interleave(blocks.columns, dim=1)[:, :width]


def chunks(shape: Sequence[int], blocks: Blocks, elements: int) -> Iterator[tuple[slice, slice]]:
    """Divide a weight into groups of whole rows of about `elements` elements, without cutting a block. Yields slices (rows of the
    weight, rows of its grid of scales). The rows of several matrices are numbered consecutively.
    """
    count, rows, width = matrices(shape, blocks.columns)
    step = max(1, elements // max(1, width * blocks.rows)) * blocks.rows
    down = -(-rows // blocks.rows)
    if blocks.rows == 1:
        count, rows, down = 1, count * rows, count * rows
    for matrix in range(count):
        for start in range(0, rows, step):
            stop = min(rows, start + step)
            scales = slice(matrix * down + start // blocks.rows, matrix * down + -(-stop // blocks.rows))
            yield slice(matrix * rows + start, matrix * rows + stop), scales
