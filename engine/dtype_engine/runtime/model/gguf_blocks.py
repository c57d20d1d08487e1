"""Dequantizing tensors in the block formats of GGUF (Q8_0, Q4_K, ...) with the gguf package."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dtype_engine.checkpoint import CheckpointTensor
from dtype_engine.core.errors import UserError
from dtype_engine.core.foreign_code import failures_as
from dtype_engine.core.regular_files import reading
from dtype_engine.core.text import printable

_VALUES_AT_ONCE = 1 << 20
"""Number of values that are dequantized at once. The gguf package allocates several float32 arrays of this size."""


def dequantize(stored: CheckpointTensor, first_row: int = 0, last_row: int | None = None) -> npt.NDArray[np.float32]:
    """Return the float32 values that `gguf.quants.dequantize` computes for a tensor in a block format, in the tensor's shape; or,
    if `last_row` is given, only the rows from `first_row` up to it: [rows, columns]. All dimensions but the last count as rows.

    Raises UserError if the file can't be read.
    """
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize as to_values

    tensor_type = GGMLQuantizationType[stored.dtype.upper()]
    block, width = GGML_QUANT_SIZES[tensor_type]
    whole = last_row is None
    in_row = stored.shape[-1] // block if stored.shape else 1
    start, end = (0, stored.nbytes // width) if last_row is None else (first_row * in_row, last_row * in_row)
    values = np.empty((end - start) * block, dtype=np.float32)
    step = max(1, _VALUES_AT_ONCE // block)
    with reading(stored.file), open(stored.file, "rb") as file, np.errstate(all="ignore"):
        file.seek((stored.start or 0) + start * width)
        for first in range(start, end, step):
            count = min(step, end - first)
            blocks = np.frombuffer(file.read(count * width), dtype=np.uint8)
            if len(blocks) != count * width:
                raise UserError(f"{stored.file} was cut short while {printable(stored.name)} was read")
            with failures_as(UserError, f"{stored.file}: the gguf package can't dequantize {printable(stored.name)}"):
                part = to_values(blocks.reshape(count, width), tensor_type)
            values[(first - start) * block : (first - start + count) * block] = part.reshape(-1)
    return values.reshape(stored.shape if whole else (-1, in_row * block))
