"""Describes a weight that another program quantized: its name, shape, format, and the tensors that hold it in the files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from dtype_engine.checkpoint.safetensors_header import CheckpointTensor
from dtype_engine.checkpoint.schemes.configuration import declared
from dtype_engine.core.dtypes import PER_TENSOR
from dtype_engine.core.errors import UserError
from dtype_engine.core.hints import hint
from dtype_engine.core.regular_files import reading

if TYPE_CHECKING:
    from dtype_engine.checkpoint.schemes.scheme import Scheme

CODES = "codes"
"""The key in `EncodedWeight.parts` of the tensor that has a code for each value. Every encoded weight has such a tensor."""
MOST_EXPERTS = 4096
"""The maximum number of experts in a tensor that is split into a weight for each expert."""
_LARGEST_PART = 1 << 20


class EncodedWeight(msgspec.Struct, frozen=True, gc=False):
    """A weight that another program stored as codes, with the scales and other tensors that turn codes into values."""

    name: str
    """The name of the weight in the unquantized checkpoint, such as `model.layers.0.mlp.down_proj.weight`."""
    shape: tuple[int, ...]
    """The shape of the weight in the unquantized checkpoint: [out, in], or [experts, out, in] for stacked experts."""
    scheme: Scheme
    """The scheme in which the other program stored the weight."""
    format: str
    """The name of the weight's format, such as `gptq:int4@g128` or `fp8:e4m3@128x128`. It consists of the method, the type of a
    code, and the size of a block.
    """
    parts: Mapping[str, CheckpointTensor]
    """The tensors in the files that store the weight, keyed by their role in the scheme, such as "codes", "scale" or
    "zero_point".
    """
    settings: Mapping[str, Any] = MappingProxyType({})
    """What the decoder needs besides the tensors, such as {"bits": 4, "group": 128}. The keys depend on the scheme."""
    beside: tuple[CheckpointTensor, ...] = ()
    """Tensors that belong to the weight but do not change its values, such as the scale of the layer's inputs."""

    @property
    def tensors(self) -> tuple[CheckpointTensor, ...]:
        """All tensors of the weight in the files."""
        return (*self.parts.values(), *self.beside)

    @property
    def input_scale(self) -> CheckpointTensor | None:
        """The tensor with the scale of all inputs of the weight's layer, or None if the files have none. For NVFP4, it is the scale
        of the scales of blocks.
        """
        ends = self.scheme.of_inputs
        return next((part for part in self.beside if part.name.endswith(ends) and not part.absent), None)

    def input_format(self, config: Mapping[str, Any] | None) -> str:
        """Return the format of `core.dtypes`, such as "int8", to which runtimes round the inputs of the weight's layer as the
        configuration declares, or "". If it ends with "@tensor", all inputs have the scale in `input_scale`. config: the content of
        config.json.
        """
        found = self.scheme.input_format(self, declared(config or {}))
        return "" if found.endswith(PER_TENSOR) and self.input_scale is None else found

    @property
    def nbytes(self) -> int:
        """The number of bytes of all tensors of the weight in the files."""
        return sum(tensor.nbytes for tensor in self.tensors)


def read_small(tensor: CheckpointTensor) -> bytes:
    """Return the bytes of a small tensor, such as a shape or a description in JSON, read without torch.

    Raises UserError if the tensor is larger than 1 MiB or its file can't be read.
    """
    if tensor.absent:
        raise UserError(f"{tensor.file}: {tensor.name} is too large to be read from a hub; {hint('download')}")
    if tensor.nbytes > _LARGEST_PART or tensor.start is None:
        raise UserError(f"{tensor.file}: {tensor.name} has {tensor.nbytes} bytes, too many for what it describes")
    with reading(tensor.file):
        file = os.open(
            tensor.file, os.O_RDONLY | os.O_CLOEXEC
        )  # a Python file object would take twice as long, and there are many weights
        try:
            found = os.pread(file, tensor.nbytes, tensor.start)
        finally:
            os.close(file)
    if len(found) < tensor.nbytes:
        raise UserError(f"{tensor.file} was cut short while it was read")
    return found
