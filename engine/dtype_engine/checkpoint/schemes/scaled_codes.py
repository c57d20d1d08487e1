"""Makes the description of a weight whose codes have a scale for each block, if its tensors have the shapes that this requires."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from dtype_engine.checkpoint.safetensors_header import CheckpointTensor
from dtype_engine.checkpoint.schemes.encoded_weight import CODES, EncodedWeight

FP8 = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
"""The short names of the float8 dtypes that are read."""
EXPONENTS = ("uint8", "float8_e8m0fnu")
"""The dtypes of scales that are powers of two."""
_SCALES = ("float32", "bfloat16", "float16")
_BESIDE = (
    "input_scale", "input_global_scale", "input_zero_point", "output_scale", "output_zero_point", "k_scale", "v_scale",
    "activation_scale", "scale_input",
)  # fmt: skip
"""Tensors of a module that belong to its inputs, its outputs or the cache."""


def grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Return the shape of the scales of a weight [..., rows, columns] in blocks of which the last may be smaller."""
    *front, rows, columns = shape
    return (*front, -(-rows // block[0]), -(-columns // block[1]))


def same_grid(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Return whether two shapes differ at most in dimensions of one element, as [rows] and [rows, 1] do."""
    return [extent for extent in shape if extent != 1] == [extent for extent in wanted if extent != 1]


def swizzled_size(rows: int, blocks: int) -> int:
    """Return the number of scales that cuBLAS wants for rows of some blocks: whole tiles of 128 rows by 4 blocks."""
    return -(-rows // 128) * 128 * -(-blocks // 4) * 4


def describe(
    name: str,
    scheme: str,
    kind: str,
    shape: tuple[int, ...],
    block: tuple[int, int] | str,
    parts: Mapping[str, CheckpointTensor | None],
    tensors: Mapping[str, CheckpointTensor],
    *,
    scales: tuple[str, ...] = _SCALES,
    settings: Mapping[str, Any] | None = None,
    beside: tuple[CheckpointTensor | None, ...] = (),
) -> EncodedWeight | None:
    """Return the description of a weight, or None if one of its tensors is missing (None in `parts`) or does not fit.

    kind: the type of a code, such as "int4". block: rows and columns, or "channel" or "tensor" for one scale for a row or for all
    values. parts: the tensors by role. tensors: all tensors of the files; those of the same module that belong to inputs or outputs
    are added to `beside`. scales: the dtypes that the scales of blocks may have.
    """
    found = {role: part for role, part in parts.items() if part is not None}
    if len(found) < len(parts) or len(shape) not in (2, 3) or not all(shape):
        return None
    rows, columns = shape[-2:]
    height, width = {"channel": (1, columns), "tensor": (rows, columns)}[block] if isinstance(block, str) else block
    scale, more = found["scale"], dict(settings or {})
    wanted = grid(shape, (height, width))
    fits = scale.dtype in scales and (
        prod(scale.shape) == swizzled_size(*wanted[-2:]) and len(shape) == 2
        if more.get("swizzled")
        else same_grid(scale.shape, wanted)
    )
    of_tensor, of_inputs = found.get("tensor_scale"), found.get("input_scale")
    if of_tensor is not None:
        fits = fits and of_tensor.dtype in _SCALES and same_grid(of_tensor.shape, shape[:-2] if of_tensor.shape else ())
    if of_inputs is not None:
        fits = fits and of_inputs.dtype in _SCALES and of_inputs.shape == (columns,)
    if not fits:
        return None
    text = block if isinstance(block, str) else f"{height}x{width}" if height > 1 else f"g{width}"
    module = name[: name.rfind(".") + 1]
    at_module = [tensors[module + local] for local in _BESIDE if module + local in tensors]
    return EncodedWeight(
        name,
        shape,
        scheme,
        f"{scheme}:{kind}" + ("" if kind in ("nvfp4", "mxfp4", "mxfp8") else f"@{text}"),
        {CODES: found[CODES], **found},
        {"block": (height, width), **more},
        tuple(tensor for tensor in (*beside, *at_module) if tensor is not None),
    )
