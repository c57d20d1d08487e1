"""Makes the description of a weight whose codes have a scale for each block, if its tensors have the shapes that this requires."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import prod
from typing import Any

from dtype_engine.checkpoint.safetensors_header import CheckpointTensor
from dtype_engine.checkpoint.schemes.encoded_weight import EncodedWeight

FP8 = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
"""The short names of the float8 dtypes that are read."""
EXPONENTS = ("uint8", "float8_e8m0fnu")
"""The dtypes of scales that are powers of two."""
FLOATS = ("float32", "bfloat16", "float16")
"""The dtypes of scales that are plain numbers."""


def same_grid(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Return whether a tensor has a number for each block of a grid, in the grid's order. wanted: the shape of the grid, [rows,
    columns] or [experts, rows, columns]. Dimensions of one element may be missing at its end, and the only row, too. ModelOpt
    writes [rows, 1, columns, 1].
    """
    if len(wanted) == 3:
        return shape[:1] == wanted[:1] and same_grid(shape[1:], wanted[1:])
    if len(shape) == 4 and shape[1::2] == (1, 1):
        shape = shape[::2]
    return _trimmed(wanted) in (_trimmed(shape), _trimmed((1, *shape)))


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape without the dimensions of one element at its end."""
    while shape[-1:] == (1,):
        shape = shape[:-1]
    return shape


@lru_cache(4096)  # the layers of a model have a few shapes
def _block(
    shape: tuple[int, ...], block: tuple[int, int] | str, scales: tuple[int, ...], in_tiles: bool
) -> tuple[tuple[int, int], str] | None:
    """Return the rows and columns of a block and its name, or None if a weight [..., rows, columns] in such blocks, of which the
    last may be smaller, has another number of scales. scales: the shape of the scales. in_tiles: whether they fill whole tiles of
    128 rows by 4 blocks, as cuBLAS wants them.
    """
    if len(shape) not in (2, 3) or not all(shape):
        return None
    *front, rows, columns = shape
    height, width = {"channel": (1, columns), "tensor": (rows, columns)}[block] if isinstance(block, str) else block
    down, across = -(-rows // height), -(-columns // width)
    if in_tiles:
        fits = prod(scales) == -(-down // 128) * 128 * -(-across // 4) * 4 and not front
    else:
        fits = same_grid(scales, (*front, down, across))
    name = block if isinstance(block, str) else f"{height}x{width}" if height > 1 else f"g{width}"
    return ((height, width), name) if fits else None


def describe(
    name: str,
    scheme: str,
    kind: str,
    shape: tuple[int, ...],
    block: tuple[int, int] | str,
    parts: Mapping[str, CheckpointTensor | None],
    *,
    scales: tuple[str, ...] = FLOATS,
    settings: Mapping[str, Any] | None = None,
    beside: tuple[CheckpointTensor | None, ...] = (),
) -> EncodedWeight | None:
    """Return the description of a weight, or None if one of its tensors is missing (None in `parts`) or does not fit.

    kind: the type of a code, such as "int4". block: rows and columns, or "channel" or "tensor" for one scale for a row or for all
    values. parts: the tensors by role. scales: the dtypes that the scales of blocks may have. beside: tensors that do not change
    the values, or None for each that is missing.
    """
    found = {role: part for role, part in parts.items() if part is not None}
    scale, more = found.get("scale"), settings or {}
    if len(found) < len(parts) or scale is None or scale.dtype not in scales:
        return None
    described = _block(shape, block, scale.shape, bool(more.get("swizzled")))
    of_tensor, of_inputs = found.get("tensor_scale"), found.get("input_scale")
    if described is None:
        return None
    if of_tensor is not None and (
        of_tensor.dtype not in FLOATS or not same_grid(of_tensor.shape, shape[:-2] if of_tensor.shape else ())
    ):
        return None
    if of_inputs is not None and (of_inputs.dtype not in FLOATS or of_inputs.shape != shape[-1:]):
        return None
    size, text = described
    return EncodedWeight(
        name,
        shape,
        scheme,
        f"{scheme}:{kind}" + ("" if kind in ("nvfp4", "mxfp4", "mxfp8") else f"@{text}"),
        found,
        {"block": size, **more},
        tuple(tensor for tensor in beside if tensor is not None),
    )
