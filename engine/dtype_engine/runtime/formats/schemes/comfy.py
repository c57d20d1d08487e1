"""Decodes ComfyUI's formats: "offsets" (`awq_w4a16`), "int8 grid" (`asym_w4a8_int8`), and all others (by `block_scaled`)."""

from __future__ import annotations

import torch

from dtype_engine.checkpoint.schemes import CODES, CodedWeight
from dtype_engine.runtime.formats.schemes import Parts, block_scaled
from dtype_engine.runtime.formats.schemes.unpack import (
    decode_rows,
    look_up,
    pairs,
    scale_groups,
    scale_values,
    unpack,
    unrotate,
)


def _decode_offsets(weight: CodedWeight, parts: Parts, first: int, last: int) -> torch.Tensor:
    def fill(out: torch.Tensor, start: int, stop: int) -> None:
        unpack(parts[CODES][start:stop], 4, out)
        scale, offset = (parts[role][:, start:stop].t().to(torch.float32) for role in ("scale", "offset"))
        scale_groups(out.sub_(8), scale, offset=offset)

    return decode_rows(first, last, weight.shape[1], fill)


def _decode_on_int8_grid(weight: CodedWeight, parts: Parts, first: int, last: int) -> torch.Tensor:
    """Decode the layout "int8 grid". A value times its group's scale is rounded to int8, as ComfyUI does before it multiplies."""
    bits, columns = weight.settings["bits"], weight.shape[1]
    table = pairs(parts["table"].to(torch.float32)) if "table" in parts else None
    scales = parts["scale"].view(torch.float8_e4m3fn)

    def fill(out: torch.Tensor, start: int, stop: int) -> None:
        codes = parts[CODES][start:stop]
        if table is not None:
            look_up(codes, table, out)
        else:
            unpack(codes[:, : columns // 2], 4, out)
            if bits == 6:
                high = torch.empty_like(out)
                unpack(codes[:, columns // 2 :], 2, high)
                out.add_(high, alpha=16)
            out.sub_(1 << (bits - 1))
        scale_groups(out, scale_values(scales[start:stop]))
        out.round_().clamp_(-127, 127).mul_(parts["row_scale"][start:stop, None].to(torch.float32))
        out.copy_(unrotate(out, weight.settings["rotation"]))

    return decode_rows(first, last, columns, fill)


_DECODERS = {"offsets": _decode_offsets, "int8 grid": _decode_on_int8_grid}


def decode(weight: CodedWeight, parts: Parts, first: int, last: int) -> torch.Tensor:
    """Return the values of a weight for ComfyUI from `first` up to `last` along its first dimension, in float32."""
    return _DECODERS.get(weight.settings.get("layout", ""), block_scaled.decode)(weight, parts, first, last)
