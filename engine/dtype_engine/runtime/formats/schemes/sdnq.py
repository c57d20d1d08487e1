"""Decodes SDNQ: packed integers or floats with a scale and a zero point for each group, a product of two matrices, a rotation."""

from __future__ import annotations

import torch

from dtype_engine.checkpoint.schemes import CODES, CodedWeight
from dtype_engine.runtime.formats.schemes import Parts
from dtype_engine.runtime.formats.schemes.unpack import (
    decode_rows,
    minifloat_values,
    scale_groups,
    unpack,
    unrotate,
    write_plain,
)

_PACKED = {
    3: ([(0, 0, 3, 0)], [(1, 0, 3, 0)], [(2, 0, 3, 0)], [(0, 3, 3, 0)], [(1, 3, 3, 0)], [(2, 3, 3, 0)],
        [(0, 6, 2, 0), (2, 6, 1, 2)], [(1, 6, 2, 0), (2, 7, 1, 2)]),
    5: ([(0, 0, 5, 0)], [(1, 0, 5, 0)], [(2, 0, 5, 0)], [(3, 0, 5, 0)], [(4, 0, 5, 0)], [(0, 5, 3, 0), (3, 5, 2, 3)],
        [(1, 5, 3, 0), (4, 5, 2, 3)], [(2, 5, 3, 0), (4, 7, 1, 3), (3, 7, 1, 4)]),
    6: ([(0, 0, 6, 0)], [(1, 0, 6, 0)], [(2, 0, 6, 0)], [(2, 6, 2, 0), (1, 6, 2, 2), (0, 6, 2, 4)]),
    7: (*([(byte, 0, 7, 0)] for byte in range(7)), [(byte, 7, 1, 6 - byte) for byte in range(7)]),
}  # fmt: skip
"""How the first bytes of a weight hold its first codes, and each further run of as many bytes the next ones: for each number of
bits, the fields of each code, as (byte, lowest bit in the byte, number of bits, lowest bit in the code). See SDNQ, `packed_int`.
Codes of 2 and 4 bits follow each other without gaps, the first in the lowest bits.
"""


def decode(weight: CodedWeight, parts: Parts, first: int, last: int) -> torch.Tensor:
    """Return the values of an SDNQ weight from `first` up to `last` along its first dimension: code times scale, plus zero point,
    plus the product of the two matrices.
    """
    settings, (rows, columns) = weight.settings, weight.shape
    if settings["transposed"]:
        parts = {role: part if role in ("up", "down") else part.t() for role, part in parts.items()}
    if settings.get("low_rank_transposed"):
        parts = {role: part.t() if role in ("up", "down") else part for role, part in parts.items()}
    scale = parts["scale"].reshape(rows, -1)
    zero = parts["zero"].reshape(rows, -1) if "zero" in parts else None
    down = parts["down"].to(torch.float32) if "down" in parts else None

    def fill(out: torch.Tensor, start: int, stop: int) -> None:
        if settings["bits"] == 8 and settings["exponent"] is None:
            write_plain(parts[CODES][start:stop].reshape(out.shape), out)
        else:
            _unpack(weight, parts[CODES].reshape(-1), start * columns, out)
        offset = None if zero is None else zero[start:stop].to(torch.float32)
        scale_groups(out, scale[start:stop].to(torch.float32), offset=offset)
        if down is not None:
            out.addmm_(parts["up"][start:stop].to(torch.float32), down)
        if "rotation" in settings:
            out.copy_(unrotate(out, settings["rotation"]))

    return decode_rows(first, last, columns, fill)


def _unpack(weight: CodedWeight, packed: torch.Tensor, begin: int, out: torch.Tensor) -> None:
    """Write the values of codes to `out`, not yet scaled. packed: the bytes of all codes, uint8. begin: the number of the first
    code that is written.
    """
    bits, exponent = weight.settings["bits"], weight.settings["exponent"]
    fields = _PACKED.get(bits)
    together = len(fields) if fields else 8 // bits
    width = bits * together // 8
    low, high = begin // together, -(-(begin + out.numel()) // together)
    runs = packed[low * width : high * width].view(-1, width)
    codes = torch.empty(len(runs), together, dtype=torch.float32)
    if fields is None:
        unpack(runs, bits, codes)
    else:
        for place, places in enumerate(fields):
            codes[:, place] = sum(
                (runs[:, byte] >> lowest).bitwise_and_((1 << count) - 1) << to for byte, lowest, count, to in places
            )
    held = codes.view(-1)[begin - low * together :][: out.numel()].view(out.shape)
    if exponent is not None:
        table = minifloat_values(exponent, bits - 1 - exponent)
        held = table.index_select(0, held.reshape(-1).to(torch.int32)).view(out.shape)
    elif not weight.settings["unsigned"]:
        held = held.sub_(1 << (bits - 1))
    out.copy_(held)
