"""Quantizes a tensor to a format with scales, such as float8 or int8.

A tensor w in `float8_e4m3fn`, `float8_e5m2` or `int8` is stored as codes q = round(w / s), of w's shape, and float32 scales s =
amax(|w|) / (the dtype's largest value). A tensor of two or more dimensions has one scale for each output channel (dimension 0), or
for each row of its last dimension if the dtype's name ends in `@row`. A vector, a scalar, and any tensor in a dtype whose name ends
in `@tensor` or `@fused` has one scale. A scale is never below float32's smallest
normal value, since subnormal scales lose bits and even smaller scales are zero. It is also limited so that its product with the
largest code is finite in float32. The dequantized values are q · s, computed in float32 and rounded once to the target dtype.
`core.dtypes.nbytes_in` returns the number of bytes of codes and scales.

`runtime/formats/` quantizes to block formats, and dequantizes all formats (`dequantize.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch

from dtype_engine.core import dtypes
from dtype_engine.core.llama_types import llama_type
from dtype_engine.runtime.formats import llama_blocks, mx
from dtype_engine.runtime.formats.dequantize import Workspace, dequantize, torch_dtype
from dtype_engine.runtime.formats.quantize_blocks import quantize_blocks
from dtype_engine.runtime.formats.row_blocks import Values, as_rows, finite_amax, parallel_map, row_amax, row_slices
from dtype_engine.runtime.formats.scales import FLOAT32_MAX, Scales, amax_to_scale


def cast_or_quantize(
    tensor: torch.Tensor, dtype: str, amax: float | None = None, given: Scales | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Cast `tensor` to `dtype`. Returns (values, None), or (codes, scales) for a format with scales such as float8 or int8.

    Scales are float32. A block format has [blocks down, blocks across]. A format whose name ends in `@tensor` or `@fused` has one
    scale, [1], and one that ends in `@row` has [product of all dimensions but the last].
    A type of llama.cpp has its values, float32, and the scale 1, [1].
    Any other format has one scale for each output channel, [tensor.shape[0]], or [1] if the tensor has fewer than two dimensions.
    The scale of a channel of zeros is 1. Only finite values determine the scales; other values stay unchanged if the dtype has
    codes for them.

    amax: the |value| from which the tensor scale of a block format is computed, for tensors that share one scale; by default, the
    largest finite |value| of this tensor. given: the scales of all blocks or channels; by default, the values determine them.
    """
    target = torch_dtype(dtype)
    if dtype not in dtypes.STORAGE_DTYPES:
        return tensor.to(target), None
    if llama_type(dtype) is not None:  # a rounding has given the values with the scales
        return tensor.float() if given is not None else llama_blocks.rounded(tensor, dtype), tensor.new_ones(1).float()
    if dtype in dtypes.BLOCK_FORMATS:
        return quantize_blocks(tensor, dtype, amax, given)
    quantized = torch.empty(tensor.shape, dtype=target, device=tensor.device)
    flat = quantized.view(-1)

    def keep(start: int, codes: torch.Tensor) -> None:
        flat[start : start + len(codes)] = codes

    return quantized, quantize_in_blocks(tensor, dtype, keep, amax if dtypes.BY_NAME[dtype].per_tensor else None, given)


def values_in(tensor: torch.Tensor, dtype: str, compute: torch.dtype, amax: float | None = None) -> torch.Tensor:
    """Return a copy of `tensor` cast to `dtype` and, with scales, dequantized to `compute`. amax: the |value| from which the tensor
    scale is computed; by default, the largest finite |value|.
    """
    data, scale = cast_or_quantize(tensor, dtype, amax)
    if scale is not None:
        return dequantize(data, scale, compute, dtypes.BY_NAME[dtype].blocks)
    return data.clone() if data is tensor else data


def quantize_in_blocks(
    tensor: torch.Tensor | Values,
    dtype: str,
    on_block: Callable[[int, torch.Tensor], None],
    amax: float | None = None,
    given: Scales | None = None,
) -> torch.Tensor:
    """Quantize a tensor, a few rows at a time, to a dtype without block scales. Returns its scales: float32 [channels], [rows] or
    [1].

    on_block: called as `on_block(start, codes)` in several threads and in no particular order. `codes` holds the codes of some
    rows, flat, in a buffer that is reused, and `start` is the index of the first code in the flattened tensor. amax: the |value|
    from which one scale for all channels is computed; by default, the values determine the scales. given: the scales of all
    channels.
    """
    rows = as_rows(tensor, dtype)
    top = dtypes.BY_NAME[dtype].max
    scales = torch.empty(rows.shape[0], dtype=torch.float32, device=tensor.device)
    blocks = row_slices(rows)
    if amax is None and dtypes.BY_NAME[dtype].per_tensor:
        amax = finite_amax(tensor)
    tensor_scale = (
        None if amax is None else amax_to_scale(torch.full((1,), amax, dtype=torch.float32, device=tensor.device), top)
    )

    def work(indices: Iterable[int]) -> None:
        shape = torch.Size((blocks[0].stop, rows.shape[1]))
        buffers = Workspace.like(shape, dtype, torch.float32, tensor.device)
        values = torch.empty(shape, dtype=torch.float32, device=tensor.device)
        for block in map(blocks.__getitem__, indices):
            source = rows[block]
            part = values[: len(source)].copy_(source)
            workspace = buffers.first(len(part))
            if given is not None:
                scale = given.effective.reshape(-1)[block]
            else:
                scale = amax_to_scale(row_amax(part), top) if tensor_scale is None else tensor_scale
            scales[block] = scale
            on_block(block.start * rows.shape[1], quantize_block(part, scale[:, None], dtype, workspace).view(-1))

    parallel_map(work, len(blocks), tensor.device)
    return tensor_scale if tensor_scale is not None and dtypes.BY_NAME[dtype].per_tensor else scales


def saturates_beyond(dtype: str) -> float:
    """Return the |value| above which a cast to `dtype`, a format with scales, saturates whatever the scale. This is float32's
    largest value or, if scales are powers of two, the limit in `formats.mx`.
    """
    row = dtypes.BY_NAME[dtype]
    return (
        mx.largest(row) if row.blocks is not None and row.blocks.scale in ("uint8", "float8_e8m0fnu") else FLOAT32_MAX
    )


def quantize_block(
    values: torch.Tensor, scale: torch.Tensor, dtype: str, workspace: Workspace | None = None
) -> torch.Tensor:
    """Return the codes of float32 values divided by a scale, which is broadcast, and rounded to `dtype`. NaN becomes 0 in an
    integer dtype. workspace: buffers to use instead of new memory.
    """
    top = dtypes.BY_NAME[dtype].max
    scaled = torch.div(values, scale, out=workspace.values if workspace is not None else None).clamp_(-top, top)
    target = torch_dtype(dtype)
    if target == torch.int8:
        scaled.round_()
        # A cast of NaN to an integer may give any number. The sum shows in one pass whether there is NaN; replacing it takes two.
        if not math.isfinite(float(scaled.sum())):
            scaled.nan_to_num_(0.0)
    return scaled.to(target) if workspace is None else workspace.cast.copy_(scaled)
