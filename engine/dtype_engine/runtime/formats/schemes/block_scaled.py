"""Decodes weights whose codes are multiplied by a scale for each block: the schemes of compressed-tensors, ModelOpt, DeepSeek,
gpt-oss, ComfyUI and Quark. What differs between them is in the weight's `settings`:

- `block`: the rows and columns of a block, of which the last in a row or column may be smaller;
- `code`: how codes are packed, a key of `unpack.UNPACK`, with the settings that its function reads (default "plain");
- `divide`: whether the scale of the tensor divides the scales of blocks (default: it multiplies them);
- `swizzled`: whether the scales of blocks are in the order of cuBLAS (default: row by row);
- `rotation`: the number of columns of a Hadamard matrix by which the values are multiplied (default: they are not);
- `transposed`: whether the file has [experts, out, in] where the model has [experts, in, out].

Roles: "codes", "scale" and, if the weight has them, "tensor_scale", "zero_point" (subtracted from the codes), "columns" (the index
of each column's block) and "input_scale" (a factor for each column).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from dtype_engine.checkpoint.schemes import CODES, EncodedWeight
from dtype_engine.runtime.formats.row_blocks import CHUNK, parallel_map
from dtype_engine.runtime.formats.schemes.parts import Parts
from dtype_engine.runtime.formats.schemes.unpack import (
    UNPACK,
    rows_of_tiles,
    scale_values,
    unpack_bits,
    unrotate,
    write_row_words,
)


def decode(weight: EncodedWeight, parts: Parts, first: int, last: int) -> torch.Tensor:
    """Return the rows from `first` up to `last` of a weight [out, in], or these experts of stacked experts: float32.

    Each value is the code, minus the zero point, times the product of its scales; the scale of the tensor is multiplied with the
    scale of the block before that. A transposed weight is returned as a view of memory in the file's order.
    """
    settings = weight.settings
    if settings.get("code") == "row words":
        parts = {role: part.t() for role, part in parts.items()}
    if len(weight.shape) == 2:
        return _decode_rows(settings, parts, range(first, last), weight.shape[1])
    rows, columns = weight.shape[1:][::-1] if settings.get("transposed") else weight.shape[1:]
    out = torch.empty((last - first, rows, columns), dtype=torch.float32)
    for expert in range(first, last):
        shared = {role for role, part in parts.items() if part.numel() == 1}
        own = {role: part if role in shared else part[expert] for role, part in parts.items()}
        own[CODES] = own[CODES].flatten(1)
        _fill(settings, own, range(rows), out[expert - first])
    return out.transpose(1, 2) if settings.get("transposed") else out


def _decode_rows(settings: Mapping[str, Any], parts: Parts, rows: range, columns: int) -> torch.Tensor:
    """Return some rows of a weight whose rows have `columns` values: float32 [rows, columns]."""
    packed = _rows_of_code(settings)
    whole = range(rows.start // packed * packed, -(-rows.stop // packed) * packed)
    out = torch.empty((len(whole), columns), dtype=torch.float32)
    _fill(settings, parts, whole, out)
    return out[rows.start - whole.start :][: len(rows)]


def _rows_of_code(settings: Mapping[str, Any]) -> int:
    """Return of how many rows a byte or word holds values."""
    return {"row pairs": 2, "row words": 8}.get(settings.get("code", "plain"), 1)


def _fill(settings: Mapping[str, Any], parts: Parts, rows: range, out: torch.Tensor) -> None:
    """Write some rows of a weight to `out`, float32 [rows, columns], in pieces that a processor's cache holds."""
    columns = out.shape[1]
    unpack, packed = UNPACK[settings.get("code", "plain")], _rows_of_code(settings)
    block = parts["columns"].to(torch.int64) if "columns" in parts else settings["block"][1]
    of_columns = parts["input_scale"].to(torch.float32) if "input_scale" in parts else None
    step = max(8, CHUNK // max(1, columns) // 8 * 8)
    starts = range(rows.start, rows.stop if columns else rows.start, step)

    def work(indices: range) -> None:
        for start in starts[indices.start : indices.stop : indices.step]:
            taken = range(start, min(start + step, rows.stop))
            piece = out[taken.start - rows.start : taken.stop - rows.start]
            unpack(parts[CODES][taken.start // packed : taken.stop // packed], piece, settings)
            if "zero_point" in parts:
                _by_block(piece, _zeros(settings, parts["zero_point"], taken), block, torch.Tensor.sub_)
            _by_block(piece, _scales(settings, parts, taken, columns), block, torch.Tensor.mul_)
            if of_columns is not None:
                piece.mul_(of_columns)
            if "rotation" in settings:
                piece.copy_(unrotate(piece, settings["rotation"]))

    parallel_map(work, len(starts))


def _by_block(
    values: torch.Tensor,
    scale: torch.Tensor,
    columns: int | torch.Tensor,
    change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Change values [rows, width] in place by a number for each row and block: [rows, blocks].

    columns: the number of columns in a block, or the index of each column's block.
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


def _scales(settings: Mapping[str, Any], parts: Parts, rows: range, columns: int) -> torch.Tensor:
    """Return the scales of some rows, float32 [rows, blocks], or [1, blocks] if all rows have the same ones."""
    height, width = settings["block"]
    stored, blocks = parts["scale"], -(-columns // width)
    if settings.get("swizzled"):
        scale = scale_values(rows_of_tiles(stored, rows, blocks))
    else:
        grid = stored.reshape(-1, blocks)
        if len(grid) == 1:
            scale = scale_values(grid)
        elif height == 1:
            scale = scale_values(grid[rows.start : rows.stop])
        else:
            first = rows.start // height
            index = torch.arange(rows.start, rows.stop) // height - first
            scale = scale_values(grid[first : -(-rows.stop // height)])[index]
    if "tensor_scale" in parts:
        of_tensor = parts["tensor_scale"].to(torch.float32).reshape(())
        scale = scale / of_tensor if settings.get("divide") else scale * of_tensor
    return scale


def _zeros(settings: Mapping[str, Any], zero: torch.Tensor, rows: range) -> torch.Tensor:
    """Return the zero points of some rows, float32 [rows, blocks], or [1, blocks] if all rows have the same ones. They are int8 or,
    like codes, packed in int32 words, but along the first dimension.
    """
    if settings.get("code") == "row words":
        out = torch.empty((len(rows), zero.shape[1]), dtype=torch.float32)
        write_row_words(zero[rows.start // 8 : rows.stop // 8], out, settings)
        return out
    if zero.dtype != torch.int32:
        zero = zero.reshape(-1, zero.shape[-1] if zero.dim() > 1 else 1)
        return (zero if len(zero) == 1 else zero[rows.start : rows.stop]).to(torch.float32)
    bits = settings["bits"]
    signed = unpack_bits(zero.t(), rows, bits, settings["dense"]).sub_(1 << (bits - 1))
    return signed.t().to(torch.float32)
