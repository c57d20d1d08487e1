"""Decodes weights whose codes are multiplied by a scale for each block: those of compressed-tensors, ModelOpt, DeepSeek, gpt-oss,
ComfyUI, Quark and torchao, and AWQ's "gemm" layout. The weight's `settings` tell how they differ:

- `block`: the rows and columns of a block. The last block in a row or column may be smaller.
- `code`: how codes are packed, a key of `_UNPACK`, by default "plain". Its function may need further settings.
- `scale_code`: "ue5m3" if bytes with the scales of blocks hold floats without a sign, and not exponents of two.
- `divide`: whether the scales of blocks are divided by the scale of the tensor, and not multiplied by it.
- `swizzled`: whether the scales of blocks are in the order in which tensor cores read them, and not row by row.
- `rotation`: the size of a Hadamard matrix, by which each group of as many columns is multiplied.
- `transposed`: whether the file has [experts, out, in] where the model has [experts, in, out].

The tensors have these roles: "codes", "scale" and, if the weight has them, "tensor_scale", "zero_point" (subtracted from the
codes), "columns" (the index of each column's block), "up" and "down" (two matrices whose product is added) and "input_scale" (a
factor for each column).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from dtype_engine.checkpoint.schemes import CODES, CodedWeight
from dtype_engine.runtime.formats.schemes import Parts
from dtype_engine.runtime.formats.schemes.unpack import (
    decode_rows,
    e2m1_pairs,
    float_values,
    int4_pairs,
    look_up,
    scale_values,
    unpack,
    unrotate,
    write_plain,
)

Settings = Mapping[str, Any]


def decode(weight: CodedWeight, parts: Parts, first: int, last: int) -> torch.Tensor:
    """Return a weight's values from `first` up to `last` along its first dimension. A value is (code - zero point) * scale, or
    code * scale in formats without zero points. The scales of block and tensor are first combined into one scale. A transposed
    weight is returned as a view of memory in the file's order.
    """
    settings = weight.settings
    if settings.get("code") == "row words":
        parts = {role: part.t() for role, part in parts.items()}
    if len(weight.shape) == 2:
        return _decode_matrix(settings, parts, first, last, weight.shape[1])
    rows, columns = weight.shape[1:][::-1] if settings.get("transposed") else weight.shape[1:]
    out = torch.empty((last - first, rows, columns), dtype=torch.float32)
    for expert in range(first, last):
        own = {role: part if part.numel() == 1 else part[expert] for role, part in parts.items()}
        own[CODES] = own[CODES].flatten(1)
        out[expert - first] = _decode_matrix(settings, own, 0, rows, columns)
    return out.transpose(1, 2) if settings.get("transposed") else out


def _decode_matrix(settings: Settings, parts: Parts, first: int, last: int, columns: int) -> torch.Tensor:
    code = settings.get("code", "plain")
    write, packed = _UNPACK[code], {"row pairs": 2, "row words": 8}.get(code, 1)  # how many rows share a byte or word
    block = parts["columns"].to(torch.int64) if "columns" in parts else settings["block"][1]
    of_columns = parts["input_scale"].to(torch.float32) if "input_scale" in parts else None
    down = parts["down"].to(torch.float32) if "down" in parts else None

    def fill(out: torch.Tensor, start: int, stop: int) -> None:
        write(parts[CODES][start // packed : stop // packed], out, settings)
        if "zero_point" in parts:
            _by_block(out, _zeros(settings, parts["zero_point"], range(start, stop)), block, torch.Tensor.sub_)
        _by_block(out, _scales(settings, parts, range(start, stop), columns), block, torch.Tensor.mul_)
        if down is not None:
            out.addmm_(parts["up"][start:stop].to(torch.float32), down)
        if of_columns is not None:
            out.mul_(of_columns)
        if "rotation" in settings:
            out.copy_(unrotate(out, settings["rotation"]))

    low, high = first // packed * packed, -(-last // packed) * packed
    return decode_rows(low, high, columns, fill)[first - low : last - low]


def _write_words(codes: torch.Tensor, out: torch.Tensor, settings: Settings) -> None:
    """Unpack the words in `codes` to `out`. It holds integers of `bits` bits plus 2^(bits-1), the first in the low bits."""
    unpack(codes, settings["bits"], out, settings["dense"])
    out.sub_(1 << (settings["bits"] - 1))


def _write_six_bits(codes: torch.Tensor, out: torch.Tensor, settings: Settings) -> None:
    """Write six-bit floats of the dtype `element` to `out`. Three bytes hold four floats, the first in the lowest bits."""
    unpack(codes, 6, out)
    out.copy_(float_values(settings["element"]).index_select(0, out.view(-1).to(torch.int32)).view(out.shape))


def _write_row_pairs(codes: torch.Tensor, out: torch.Tensor, settings: Settings) -> None:
    """Write int4 values in two's complement to `out`. A byte holds a value of row 2r in its low bits, and of row 2r + 1 above."""
    rows, signed = out.view(len(codes), 2, -1), codes.view(torch.int8)
    rows[:, 0] = (signed << 4) >> 4
    rows[:, 1] = signed >> 4


def _write_row_words(codes: torch.Tensor, out: torch.Tensor, settings: Settings) -> None:
    """Write 4-bit integers, two's complement if `signed`, to `out`. A word holds one of each row in `order`, lowest bits first."""
    rows, codes = out.view(len(codes), 8, -1), codes.contiguous()
    for place, row in enumerate(settings["order"]):
        nibbles = (codes >> 4 * place).bitwise_and_(15)
        rows[:, row] = nibbles.bitwise_xor_(8).sub_(8) if settings["signed"] else nibbles


_UNPACK: Mapping[str, Callable[[torch.Tensor, torch.Tensor, Settings], None]] = {
    "plain": lambda codes, out, settings: write_plain(codes, out),
    "e2m1": lambda codes, out, settings: look_up(codes, e2m1_pairs(settings.get("high_first", False)), out),
    "int4 pairs": lambda codes, out, settings: look_up(codes, int4_pairs(), out),
    "words": _write_words,
    "six bits": _write_six_bits,
    "row pairs": _write_row_pairs,
    "row words": _write_row_words,
}
"""For each value of the setting `code`: a function that writes the values of the packed codes of some rows to `out`, float32 [rows,
columns].
"""


def _by_block(
    values: torch.Tensor,
    scale: torch.Tensor,
    columns: int | torch.Tensor,
    change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Apply the in-place operation `change`, such as `torch.Tensor.mul_`, to the values of each block and the block's scale or zero
    point. values: [rows, width]. scale: the scales or zero points [rows, blocks]. columns: the number of columns in a block, or the
    index of each column's block.
    """
    if scale.shape[1] == 1:
        change(values, scale)
        return
    if isinstance(columns, torch.Tensor):
        change(values, scale.index_select(1, columns))
        return
    whole = values.shape[1] // columns
    change(values[:, : whole * columns].view(len(values), whole, columns), scale[:, :whole, None])
    if whole < scale.shape[1]:
        change(values[:, whole * columns :], scale[:, whole:])


def _scales(settings: Settings, parts: Parts, rows: range, columns: int) -> torch.Tensor:
    """Return the scales of some rows of the weight: float32 [rows, blocks], or [1, blocks] if all rows have the same scales.
    columns: the number of columns of the weight.
    """
    height, width = settings["block"]
    stored, blocks = parts["scale"], -(-columns // width)
    if settings.get("swizzled"):
        held = _rows_of_tiles(stored, rows, blocks)
    else:
        held = _rows_of_blocks(stored.reshape(-1, blocks), rows, height)
    scale = scale_values(held, settings.get("scale_code", "e8m0"))
    if "tensor_scale" in parts:
        of_tensor = parts["tensor_scale"].to(torch.float32).reshape(())
        scale = scale / of_tensor if settings.get("divide") else scale * of_tensor
    return scale


def _rows_of_blocks(grid: torch.Tensor, rows: range, height: int) -> torch.Tensor:
    """Return the scales of the blocks that contain the given rows: [rows, blocks across], or [1, blocks across] if the grid has a
    single row. grid: [blocks down, blocks across]. height: the rows of a block.
    """
    if len(grid) == 1 or height == 1:
        return grid if len(grid) == 1 else grid[rows.start : rows.stop]
    return grid[torch.arange(rows.start, rows.stop) // height]


def _rows_of_tiles(scale: torch.Tensor, rows: range, blocks: int) -> torch.Tensor:
    """Return the scales of the given rows: [rows, blocks]. scale: all scales, in the order in which tensor cores read them (cuBLAS
    documentation, "1D Block Scaling Factors Layout").

    This order consists of tiles of 128 rows by 4 blocks, which are padded at the edges. In a tile, the scale of row r and block c
    is at (r % 32) * 16 + (r // 32) * 4 + c.
    """
    across, top = -(-blocks // 4), rows.start // 128
    tiles = scale.view(torch.uint8).reshape(-1, across, 32, 4, 4)[top : -(-rows.stop // 128)]
    found = tiles.permute(0, 3, 2, 1, 4).reshape(-1, across * 4)
    return found[rows.start - top * 128 : rows.stop - top * 128, :blocks].contiguous().view(scale.dtype)


def _zeros(settings: Settings, zero: torch.Tensor, rows: range) -> torch.Tensor:
    """Return the zero points (`zero`) of the given rows: float32 [rows, blocks], or [1, blocks] if all rows have the same ones."""
    if settings.get("code") == "row words":
        out = torch.empty((len(rows), zero.shape[1]), dtype=torch.float32)
        _write_row_words(zero[rows.start // 8 : rows.stop // 8], out, settings)
        return out
    if zero.dtype != torch.int32:
        grid = zero.reshape(-1, zero.shape[-1] if zero.dim() > 1 else 1)
        return _rows_of_blocks(grid, rows, settings["block"][0]).to(torch.float32)
    bits, dense = settings["bits"], settings["dense"]
    together, taken = (32, bits) if dense else (32 // bits, 1)  # rows that fill whole words, and how many words
    low, high = rows.start // together, -(-rows.stop // together)
    words = zero[low * taken : high * taken].t()
    out = torch.empty((len(words), min((high - low) * together, 32 * words.shape[1] // bits)), dtype=torch.float32)
    unpack(words, bits, out, dense)
    return out[:, rows.start - low * together :][:, : len(rows)].t().sub(1 << (bits - 1))
