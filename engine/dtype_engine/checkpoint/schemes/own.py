"""Finds the weights that an export of this program stores with scales, whose names and dtypes are in the file's metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from dtype_engine.checkpoint.safetensors_header import CheckpointTensor
from dtype_engine.checkpoint.schemes.scheme import CODES, CodedWeight, Scheme
from dtype_engine.core import block_formats, dtypes
from dtype_engine.core.block_formats import INPUT_SCALE, SCALE, Part, parts
from dtype_engine.core.errors import UserError
from dtype_engine.core.text import printable

SCHEME = Scheme("dtype-tui", "own", of_inputs=(INPUT_SCALE,), own=True)
"""`Checkpoint` calls `read` of this module for its weights, before it reads those of other schemes."""
SCALED_KEY = "dtype_engine.scaled."
"""The prefix of the metadata keys that give a weight's format, such as `float8_e4m3fn`. The weight's name follows it."""
SHAPE_KEY = "dtype_engine.shape."
"""The prefix of the metadata keys that give the shape of a weight with packed codes, such as `16,128`. The name follows it."""
OWN_SUFFIX = "_quantized"
"""The suffix of codes in a format that compressed-tensors can't express. Without it, other loaders would read codes as values."""


def read(path: Path, tensors: Mapping[str, CheckpointTensor], metadata: Mapping[str, str]) -> dict[str, CodedWeight]:
    """Return the weights of this program's export by name. Raises UserError if the metadata does not match the tensors."""
    weights: dict[str, CodedWeight] = {}
    owners: dict[str, str] = {}
    for key, dtype in metadata.items():
        if not key.startswith(SCALED_KEY):
            continue
        name = key.removeprefix(SCALED_KEY)
        found = _read_weight(name, dtype, tensors, metadata.get(SHAPE_KEY + name))
        if found is None:
            raise UserError(
                f"{path}: the tensors of {printable(name)} are not those of a weight in {printable(dtype)} with its scales"
            )
        for part in found.parts.values():
            if (owner := owners.setdefault(part.name, name)) != name:
                raise UserError(
                    f"{path}: tensor {printable(part.name)} is a part of two weights, {printable(owner)} and {printable(name)}"
                )
        weights[name] = found
    return weights


def _read_weight(
    name: str, dtype: str, tensors: Mapping[str, CheckpointTensor], packed_shape: str | None
) -> CodedWeight | None:
    """Return a weight, or None if one of its tensors is missing or does not fit. packed_shape: the shape of
    the weight before packing, such as "16,128".
    """
    row = dtypes.BY_NAME.get(dtype)
    if row is None or dtype not in dtypes.STORAGE_DTYPES or row.llama is not None:
        return None
    data = next((tensors[own] for own in codes_names(name, dtype) if own in tensors), None)
    if data is None:
        return None
    shape = data.shape
    if row.blocks is not None and row.blocks.packing != "none":
        words = (packed_shape or "").split(",")
        shape = tuple(map(int, words)) if all(word.isdecimal() and len(word) < 16 for word in words) else ()
        if math.prod(shape) > 8 * data.nbytes:  # before anything is worked out by it
            return None
    found = {}
    for part in parts_in(shape, dtype):
        tensor = tensors.get(name + part.suffix) if part.suffix else data
        if tensor is None or tensor.dtype != part.dtype or tensor.nbytes != part.nbytes:
            return None
        found[part.suffix or CODES] = tensor
    of_inputs = tensors.get(input_scale_name(name)) if row.blocks is not None and row.blocks.tensor_scale else None
    if of_inputs is not None and (of_inputs.dtype, of_inputs.shape) != ("float32", (1,)):
        return None
    return CodedWeight(name, shape, SCHEME, dtype, found, beside=() if of_inputs is None else (of_inputs,))


def codes_names(name: str, dtype: str) -> tuple[str, str]:
    """Return two names for a weight's codes: the first is used if other programs can read them, the second if only this one can."""
    blocks = dtypes.BY_NAME[dtype].blocks
    packed = "_packed" if blocks is not None and blocks.packing != "none" else ""
    return name + packed, name + OWN_SUFFIX + packed


def input_scale_name(name: str) -> str:
    """Return the name of the tensor that holds the scale for the inputs of the layer with the weight `name`."""
    return f"{name.rpartition('.')[0]}.{INPUT_SCALE}".removeprefix(".")


def parts_in(shape: tuple[int, ...], dtype: str) -> tuple[Part, ...]:
    """Return the tensors (codes, scales, ...) with which a file stores a weight of `shape` in the format `dtype`."""
    row = dtypes.BY_NAME[dtype]
    if row.blocks is not None:
        return parts(shape, row.blocks, row.bits, row.torch_name)
    count = dtypes.scale_count(shape, dtype)
    matrix = len(shape) == 2 and not row.per_tensor
    return (
        Part(block_formats.CODES, row.torch_name, shape, math.prod(shape) * row.bits // 8),
        Part(SCALE, "float32", (count, 1) if matrix else (count,), dtypes.SCALE_BYTES * count),
    )
