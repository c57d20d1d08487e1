"""Describes a weight whose codes have a scale for each block, after a check that its tensors have the required shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from math import prod
from typing import Any

from msgspec.structs import replace

from dtype_engine.checkpoint.safetensors_header import CheckpointTensor
from dtype_engine.checkpoint.schemes.scheme import CodedWeight, Scheme

FP8 = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
"""The float8 dtypes in which weights are read, with their short names."""
EXPONENTS = ("uint8", "float8_e8m0fnu")
"""The dtypes of scales that are powers of two."""
FLOATS = ("float32", "bfloat16", "float16")
"""The dtypes of scales that are ordinary floating-point numbers."""
_OF_ONE_BLOCK = ("nvfp4", "nvfp4_e5m3", "nvfp4_svd", "mxfp4", "mxfp8")
"""The types of codes that always have blocks of one size, which is not part of the format's name."""


def packed_words(
    tensors: Mapping[str, CheckpointTensor],
) -> Iterator[tuple[str, CheckpointTensor, CheckpointTensor, CheckpointTensor]]:
    """Yield the stem, `qweight`, `scales` and `qzeros` of each weight in words of 32 bits, as AutoGPTQ and AutoAWQ store it."""
    for name, codes in tensors.items():
        stem = name.removesuffix("qweight")
        scale, zero = tensors.get(f"{stem}scales"), tensors.get(f"{stem}qzeros")
        if stem == name or scale is None or zero is None or scale.dtype not in FLOATS:
            continue
        is_in_words = all(part.dtype in ("int32", "uint32") for part in (codes, zero))
        if is_in_words and all(len(part.shape) == 2 for part in (codes, scale, zero)):
            yield stem, codes, scale, zero


def same_grid(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Return whether a tensor with this shape has one scale for each block. wanted: the number of blocks, [rows, columns] or
    [experts, rows, columns]. In `shape`, dimensions of size 1 may be missing at the end, or at the start of [rows, columns].
    ModelOpt's [rows, 1, columns, 1] fits, too.
    """
    if len(wanted) == 3:
        return shape[:1] == wanted[:1] and same_grid(shape[1:], wanted[1:])
    if len(shape) == 4 and shape[1::2] == (1, 1):
        shape = shape[::2]
    return _trimmed(wanted) in (_trimmed(shape), _trimmed((1, *shape)))


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    while shape[-1:] == (1,):
        shape = shape[:-1]
    return shape


@lru_cache(4096)  # all layers of a model together have only a few shapes
def _block(
    shape: tuple[int, ...], block: tuple[int, int] | str, scales: tuple[int, ...], in_tiles: bool
) -> tuple[tuple[int, int], str] | None:
    """Return the size of a block of values that share a scale, and its name, such as ((128, 128), "128x128"), or None if a weight
    of this shape would need another number of scales. The last block in a row or column may be smaller. in_tiles: whether the
    scales are padded to whole tiles of 128 rows by 4 blocks, as cuBLAS requires.
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
    scheme: Scheme,
    kind: str,
    shape: tuple[int, ...],
    block: tuple[int, int] | str,
    parts: Mapping[str, CheckpointTensor | None],
    *,
    scales: tuple[str, ...] = FLOATS,
    settings: Mapping[str, Any] | None = None,
) -> CodedWeight | None:
    """Return the description of a weight, or None if a tensor in `parts` is None, or its dtype or shape does not fit.

    kind: the type of a code, such as "int4". block: the rows and columns of a block, "channel" if each row has a scale, or "tensor"
    if there is a single scale. scales: the dtypes that the scales of blocks may have. settings: what the decoder needs besides the
    tensors.
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
    return CodedWeight(
        name,
        shape,
        scheme,
        f"{scheme.name}:{kind}" + ("" if kind in _OF_ONE_BLOCK else f"@{text}"),
        found,
        {"block": size, **more},
    )


def with_beside(weight: CodedWeight | None, *tensors: CheckpointTensor | None) -> CodedWeight | None:
    """Return a weight with `tensors` added to its `beside`. They do not change the weight's values: scales of inputs, for example.
    Those that are None are left out.
    """
    more = tuple(tensor for tensor in tensors if tensor is not None)
    return replace(weight, beside=(*weight.beside, *more)) if weight is not None and more else weight
