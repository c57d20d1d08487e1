"""Decodes GPTQ's layout. It packs codes along the inputs of a weight, and zero points along its outputs."""

from __future__ import annotations

import torch

from dtype_engine.checkpoint.schemes import CODES, CodedWeight
from dtype_engine.core.errors import UserError
from dtype_engine.core.text import printable
from dtype_engine.runtime.formats.schemes import Parts
from dtype_engine.runtime.formats.schemes.unpack import decode_rows, scale_groups, unpack


def decode(weight: CodedWeight, parts: Parts, first: int, last: int) -> torch.Tensor:
    """Return the values of a GPTQ weight from `first` up to `last` along its first dimension: (code - zero point) times scale.
    Raises UserError if a column is in a group without a scale.
    """
    order = _order(weight, parts)
    scale = parts["scale"][:, first:last].t().to(torch.float32).contiguous()
    zero = _zero_points(weight, parts["zero"], first, last)

    def fill(out: torch.Tensor, start: int, stop: int) -> None:
        _unpack(parts[CODES][:, start:stop].t(), weight.settings["planes"], out)
        rows = slice(start - first, stop - first)
        if order is None:
            scale_groups(out, scale[rows], zero[rows])
        else:
            out.sub_(zero[rows].index_select(1, order)).mul_(scale[rows].index_select(1, order))

    return decode_rows(first, last, weight.shape[1], fill)


def _unpack(packed: torch.Tensor, planes: tuple[int, ...], out: torch.Tensor) -> None:
    """Unpack the codes in every row of `packed` to `out`, float32 [rows, codes]. packed: int32 words. planes: the widths of the
    planes into which the bits of a code are split, from the lowest bits on.
    """
    if len(planes) == 1:
        unpack(packed, planes[0], out)
        return
    blocks, first, factor = packed.contiguous().view(-1, sum(planes)), 0, 1  # 32 codes in each
    plane = torch.empty(len(blocks), 32, dtype=torch.float32)
    codes = out.view(-1, 32).zero_()
    for width in planes:
        unpack(blocks[:, first : first + width].contiguous(), width, plane)
        codes.add_(plane, alpha=factor)
        first, factor = first + width, factor << width


def _zero_points(weight: CodedWeight, packed: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Return the zero points of the rows from `first` up to `last`: float32 [rows, groups]. packed: the file's zero points, int32
    [groups, out * bits / 32].

    The first version of the format stores each zero point minus one. GPTQModel (`convert_gptq_v2_to_v1_format_module`) subtracts
    the ones of a packed word all at once, so that a zero point of 0 borrows from its neighbor. One addition to the word undoes
    this. With 3 bits, each zero point is decreased separately, and 0 becomes 7.
    """
    bits, added = weight.settings["bits"], weight.settings["added"]
    low, high = first // 32 * 32, min(-(-last // 32) * 32, weight.shape[0])  # 32 codes take whole words
    zero = torch.empty(len(packed), high - low, dtype=torch.float32)
    words = packed[:, low * bits // 32 : high * bits // 32].view(torch.int32)
    if bits == 3 or not added:
        _unpack(words, weight.settings["planes"], zero)
        zero.add_(added).remainder_(1 << bits)
    else:
        ones = sum(1 << place for place in range(0, 32, bits))
        unpack(words + added * ones, bits, zero)
    return zero[:, first - low : last - low].t().contiguous()


def _order(weight: CodedWeight, parts: Parts) -> torch.Tensor | None:
    """Return each column's group, int64 [in], or None if groups of equal size follow each other. Raises UserError for an unknown
    group.
    """
    columns, groups, size = weight.shape[1], len(parts["scale"]), weight.settings["group"]
    regular = torch.arange(columns) // size
    order = parts["g_idx"].to(torch.int64) if "g_idx" in parts else regular
    if columns and (order.min() < 0 or order.max() >= groups):
        name = printable(weight.parts["g_idx"].name)
        raise UserError(
            f"{name} names groups from {order.min()} to {order.max()}, and the weight has groups 0 to {groups - 1}"
        )
    return None if columns == groups * size and torch.equal(order, regular) else order
