"""Makes the tensors of a weight in GPTQ's layout, of the codes and scales that the weight's format gives it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.core.text import printable
from dtype_engine.runtime.export.contents import ExportTensor
from dtype_engine.runtime.formats.blocks import BlockWork, Chunk
from dtype_engine.runtime.formats.code_packing import pack_words
from dtype_engine.runtime.formats.quantize_blocks import quantize_chunks
from dtype_engine.runtime.formats.scales import Scales
from dtype_engine.runtime.weights.pieces import Pieces

OnCodes = Callable[[int, torch.Tensor], None]
"""Called with (the index of the first of some values of a weight, their codes, int8)."""


def gptq_tensors(
    values: torch.Tensor | Pieces, item: ExportTensor, given: Scales | None, on_codes: OnCodes
) -> tuple[torch.Tensor, ...]:
    """Return the tensors that store a weight: those of `entries`, in this order.

    values: the weight's values, [out, in]. item: the weight, in one of the layouts of `core.file_layouts`. given: the scales of
    its blocks, or None to compute them from the values. Raises UserError if float16 can't hold a scale, because the values would be
    others.
    """
    element, layout = dtypes.BY_NAME[item.dtype], item.file_layout
    assert element.blocks is not None
    assert layout is not None
    codes_entry, *_ = item.entries
    codes = torch.empty(codes_entry.shape, dtype=torch.int32)
    found: dict[int, Scales] = {}

    def keep(_: BlockWork, chunk: Chunk) -> None:
        own = chunk.codes(element)
        on_codes(chunk.first * own.shape[1], own.reshape(-1))
        codes[:, chunk.first : chunk.first + len(own)] = pack_words(chunk.file_codes(element), element.bits).t()
        found[chunk.first_scale] = chunk.scales

    quantize_chunks(values, item.dtype, keep, None, given)
    of_rows = [found[first] for first in sorted(found)]
    scales = _in_float16(item, torch.cat([each.stored for each in of_rows]))
    middle = torch.zeros(scales.shape, dtype=torch.int8)
    zero = torch.cat([each.zero for each in of_rows if each.zero is not None] or [middle]) - layout.subtracted
    groups = torch.arange(item.shape[1], dtype=torch.int32) // element.blocks.columns
    return codes, scales.t().contiguous(), pack_words(zero.t(), element.bits), groups.to(torch.int32)


def _in_float16(item: ExportTensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the scales as float16. Raises UserError if that changes one of them."""
    cast = scales.to(torch.float16)
    changed = cast.to(torch.float32) != scales.to(torch.float32)
    if changed.any():
        first = float(scales[changed][0])
        name = printable(item.name)
        raise UserError(
            f"{int(changed.sum())} of {changed.numel()} scales of {name}, such as {first:.3e}, have no float16, in which GPTQ's "
            f"layout stores scales, so its values would change; leave it as stored, as in --cast '{name.removesuffix('.weight')}"
            "=stored', or export it in the layout compressed-tensors"
        )
    return cast
