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


def dequantize(stored: CheckpointTensor) -> npt.NDArray[np.float32]:
    """Return the float32 values that `gguf.quants.dequantize` computes for a tensor in a block format, in the tensor's shape.

    Raises UserError if the file can't be read.
    """
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize as to_values

    tensor_type = GGMLQuantizationType[stored.dtype.upper()]
    block, width = GGML_QUANT_SIZES[tensor_type]
    values = np.empty(stored.nbytes // width * block, dtype=np.float32)
    step = max(1, _VALUES_AT_ONCE // block)
    with reading(stored.file), open(stored.file, "rb") as file, np.errstate(all="ignore"):
        file.seek(stored.start or 0)
        for first in range(0, stored.nbytes // width, step):
            count = min(step, stored.nbytes // width - first)
            blocks = np.frombuffer(file.read(count * width), dtype=np.uint8)
            if len(blocks) != count * width:
                raise UserError(f"{stored.file} was cut short while {printable(stored.name)} was read")
            with failures_as(UserError, f"{stored.file}: the gguf package can't dequantize {printable(stored.name)}"):
                part = to_values(blocks.reshape(count, width), tensor_type)
            values[first * block : (first + count) * block] = part.reshape(-1)
    return values.reshape(stored.shape)
