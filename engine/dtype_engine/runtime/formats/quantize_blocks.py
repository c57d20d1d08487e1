"""Quantizes a whole weight in a block format: to codes and scales for a running model, or to the tensors that a file stores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from dtype_engine.core import dtypes
from dtype_engine.core.block_formats import matrices, scale_grid
from dtype_engine.core.dtypes import DType
from dtype_engine.runtime.formats import nvfp4
from dtype_engine.runtime.formats.blocks import BlockWork, Chunk, chunks
from dtype_engine.runtime.formats.code_packing import pack_words
from dtype_engine.runtime.formats.row_blocks import Values, chunk_elements, finite_amax, parallel_map
from dtype_engine.runtime.formats.scales import Scales


def quantize_chunks(
    tensor: torch.Tensor | Values,
    dtype: str | DType,
    on_chunk: Callable[[BlockWork, Chunk], None],
    amax: float | None = None,
    given: Scales | None = None,
) -> torch.Tensor | None:
    """Quantize a weight in a block format some rows at a time. Returns the scale of the whole tensor, or None if the format has
    none.

    on_chunk: called with each chunk, in several threads and in no particular order. amax: the largest |value| of all tensors that
    share the tensor scale; by default, the largest finite |value| of this tensor. given: the scales of all blocks; by default, the
    values determine them.
    """
    element = dtypes.BY_NAME[dtype] if isinstance(dtype, str) else dtype
    assert element.blocks is not None
    count, height, width = matrices(tensor.shape, element.blocks.columns)
    rows = tensor.reshape(count * height, width)
    pieces = list(chunks(tensor.shape, element.blocks, chunk_elements(tensor.device))) if width else []
    of_tensor = None
    if element.blocks.tensor_scale:
        largest = finite_amax(tensor) if amax is None else amax
        of_tensor = nvfp4.tensor_scale(torch.tensor(largest)).to(tensor.device)

    def work(indices: Iterable[int]) -> None:
        largest = max(piece.stop - piece.start for piece, _ in pieces)
        block_work = BlockWork(element, largest, width, of_tensor, tensor.device)
        for index in indices:
            taken, scales = pieces[index]
            of_rows = None if given is None else given.rows(scales)
            on_chunk(block_work, block_work.quantize(rows[taken], taken.start, scales.start, of_rows))

    parallel_map(work, len(pieces), tensor.device)
    return of_tensor


def quantize_blocks(
    tensor: torch.Tensor, dtype: str, amax: float | None = None, given: Scales | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (a weight's codes in a block format, the scale of each block). The codes are float8_e4m3fn or int8, in the weight's
    shape and without zero points; the scales are float32 [blocks down, blocks across]. amax: the |value| from which the tensor
    scale is computed; by default, the largest finite |value|. given: as for `quantize_chunks`.
    """
    element = dtypes.BY_NAME[dtype]
    assert element.blocks is not None
    codes = torch.zeros(tensor.shape, dtype=getattr(torch, element.torch_name), device=tensor.device)
    scale = torch.ones(scale_grid(tensor.shape, element.blocks), device=tensor.device)
    count, height, width = matrices(tensor.shape, element.blocks.columns)
    rows = codes.view(count * height, width)

    def keep(work: BlockWork, chunk: Chunk) -> None:
        effective = chunk.scales.effective
        rows[chunk.first : chunk.first + len(chunk.units)] = chunk.codes(element)
        scale[chunk.first_scale : chunk.first_scale + len(effective)] = effective

    quantize_chunks(tensor, dtype, keep, amax, given)
    return codes, scale


def rounded(tensor: torch.Tensor, element: DType, amax: float | None = None) -> torch.Tensor:
    """Return a weight's values after quantizing and dequantizing, in the weight's own dtype. amax: as for `quantize_blocks`."""
    assert element.blocks is not None
    count, height, width = matrices(tensor.shape, element.blocks.columns)
    values = torch.empty((count * height, width), dtype=tensor.dtype, device=tensor.device)

    def keep(work: BlockWork, chunk: Chunk) -> None:
        values[chunk.first : chunk.first + len(chunk.units)] = work.dequantize(chunk)

    quantize_chunks(tensor, element, keep, amax)
    return values.view(tensor.shape)


def scale_tensors(
    scales: Sequence[Scales], of_tensor: torch.Tensor | None, shape: tuple[int, ...], dtype: str
) -> list[torch.Tensor]:
    """Return the tensors that a file stores for a weight of `shape` in addition to the codes, in the order of
    `core.block_formats.parts`. scales: the scales of all chunks, in row order. of_tensor: the scale of the whole tensor, if the
    format has one.
    """
    element = dtypes.BY_NAME[dtype]
    blocks = element.blocks
    assert blocks is not None
    found = [torch.cat([each.stored for each in scales]) if scales else torch.empty(0)]
    if of_tensor is not None:
        found.append(of_tensor.reshape(1))
    if blocks.zero_points:
        zero = [each.zero for each in scales if each.zero is not None]
        found.append(pack_words(torch.cat(zero).t().contiguous(), element.bits).t() if zero else torch.empty(0))
    if blocks.packing == "words":
        found.append(torch.tensor(shape, dtype=torch.int64))
    return found
