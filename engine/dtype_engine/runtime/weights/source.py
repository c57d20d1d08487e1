"""The base class of all objects from which a weight is read: in memory or in files, plain or coded, one tensor or several. Also the
simplest of them, for plain values in memory.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch.nn import functional

from dtype_engine.checkpoint import CheckpointTensor
from dtype_engine.runtime.numerics.activations import InputFormat

CPU = torch.device("cpu")


class WeightSource(ABC):
    """The values of one weight as the files store them or, if Python code has built the module, as they were when the model was
    opened. They are never written to, and several threads may read them at once.
    """

    shape: tuple[int, ...]
    """The shape of the weight in the module."""
    dtype: torch.dtype
    """The dtype of the values that are read: the stored one, or float32 for a weight that is stored as codes."""
    holds: torch.dtype
    """The dtype of the tensor, with values or a placeholder, that the module holds while the weight is not cast."""
    format: str = ""
    """The format of a weight that the files store as codes, such as "gptq:int4@g128". Otherwise ""."""
    own: bool = False
    """Whether an export of this program stored the codes, so that `format` is a format of `core.dtypes`."""
    plain: bool = False
    """Whether the module holds the values themselves while the weight is not cast. Otherwise it holds a placeholder, and each
    operation has to read or decode the values.
    """
    input_format: InputFormat | None = None
    """How runtimes round the activations that the weight multiplies, as the files declare, or None if they do not."""
    has_parts: bool = False
    """Whether `part` can read the values at one index of the first dimension, such as those of one expert, without the others."""
    nbytes: int
    """The number of bytes that the weight takes in the files."""
    unit: int = 1
    """The number of values that are always read together. Reads that start and end at its multiples decode no value twice."""
    in_files: tuple[CheckpointTensor, ...] = ()
    """The headers of the tensors that are read from files at each use of the values. Empty if the values stay in memory."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors from which the values are computed, such as codes and scales, as the files store them."""

    def held(self, device: torch.device) -> torch.Tensor:
        """Return the tensor that a module on `device` holds while the weight is not cast, in the weight's shape."""
        return placeholder(self.shape, self.holds, device)

    @abstractmethod
    def read(self, device: torch.device = CPU) -> torch.Tensor:
        """Return all values, in the weight's shape and in `dtype`, on `device`. Raises UserError if a file can't be read."""

    def read_in(self, dtype: torch.dtype, device: torch.device = CPU) -> torch.Tensor:
        """Return all values in another dtype. If possible, memory never holds all values in the source's own dtype at once."""
        return self.read(device).to(dtype)

    def elements(self, start: int, count: int) -> torch.Tensor:
        """Return `count` values on the CPU, from the flat index `start` on: [count]. Raises UserError if a file can't be read."""
        return self.read().reshape(-1)[start : start + count]

    def rows(self, first: int, last: int, device: torch.device = CPU) -> torch.Tensor:
        """Return the values at the indexes from `first` up to `last` of the first dimension. If possible, no other values are
        decoded.
        """
        return self.read(device)[first:last]

    @abstractmethod
    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows `ids` of an embedding table [rows, width], on the device of `ids`: [*ids.shape, width]."""

    def part(self, index: int, device: torch.device) -> torch.Tensor | None:
        """Return the values at one index of the first dimension, or None if the index does not exist or `has_parts` is False."""
        return None

    def release(self) -> None:  # noqa: B027
        """Drop the mappings of the files, so that their pages can leave the memory, until the values are read again."""

    def numel(self) -> int:
        """Return the number of values."""
        return math.prod(self.shape)


def placeholder(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of this shape with the memory of one element, which is NaN, so that using it by mistake becomes visible."""
    return torch.full((1,), torch.nan, device=device).to(dtype).expand(shape)


class PlainSource(WeightSource):
    """A weight of plain values that stay in memory, usually memory-mapped from a file. Reading it copies nothing, unless it moves
    the values to another device.
    """

    plain = True

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.shape, self.dtype, self.holds = tuple(tensor.shape), tensor.dtype, tensor.dtype

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self._tensor,)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self._tensor.nbytes

    def held(self, device: torch.device) -> torch.Tensor:
        return self._tensor.to(device)

    def read(self, device: torch.device = CPU) -> torch.Tensor:
        return self.held(device)

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        table = self._tensor  # if it is in a file, only its rows go to the accelerator
        return functional.embedding(ids.to(table.device), table).to(ids.device)
