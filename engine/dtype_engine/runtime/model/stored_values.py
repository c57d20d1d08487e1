"""Where the values of a live weight come from: a tensor that holds them, codes with this program's scales, or what another program
quantised.

Nothing here is ever written to. A weight that another program quantised is decoded to float32 each time when its values are read,
and the result is not kept, so that it takes no more memory than its tensors in the files.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property

import torch
from torch.nn import functional

from dtype_engine.checkpoint.schemes import EncodedWeight
from dtype_engine.core import dtypes
from dtype_engine.runtime.formats import schemes
from dtype_engine.runtime.model.mmap_reader import read_part
from dtype_engine.runtime.numerics.quantize import dequantize

_CPU = torch.device("cpu")


class StoredValues(ABC):
    """The values that files store for one weight, or those with which a module was built."""

    shape: tuple[int, ...]
    """The shape of the weight in the module."""
    dtype: torch.dtype
    """The dtype of the values that `read` and `rows` return."""
    holds: torch.dtype
    """The dtype of what the module holds while the weight is not cast."""
    tensors: tuple[torch.Tensor, ...]
    """The tensors from which the values are computed, on the CPU: as the files store them."""
    scale: torch.Tensor | None = None
    """For codes that the module holds, their scales on its device; otherwise None."""
    format: str = ""
    """The name of the format in which the files store the weight, if its values are decoded or have scales."""
    decoded: bool = False
    """Whether the module can't hold the weight as it is stored, so that each operation has to decode its values."""

    @property
    def plain(self) -> bool:
        """Whether the module holds the values themselves while the weight is not cast."""
        return self.scale is None and not self.decoded

    @property
    def nbytes(self) -> int:
        """The number of bytes of all tensors of the weight."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @abstractmethod
    def held(self, device: torch.device) -> torch.Tensor:
        """Return what the module on `device` holds while the weight is not cast, in the weight's shape."""

    @abstractmethod
    def read(self, device: torch.device = _CPU) -> torch.Tensor:
        """Return all values, in the weight's shape and in `dtype`, on `device`. Raises UserError if a file can't be read."""

    @abstractmethod
    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return some rows of an embedding table [rows, width], on the device of `ids`: [*ids.shape, width]. ids: their indexes."""


class PlainValues(StoredValues):
    """The values themselves, usually mapped from a file. They are returned without a copy."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensors = (tensor,)
        self.shape, self.dtype, self.holds = tuple(tensor.shape), tensor.dtype, tensor.dtype

    def held(self, device: torch.device) -> torch.Tensor:
        return self.tensors[0].to(device)

    def read(self, device: torch.device = _CPU) -> torch.Tensor:
        return self.held(device)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids, self.read(ids.device))


class QuantizedValues(StoredValues):
    """Codes with scales that this program's export stored. format: its name in `core.dtypes`. scale: on the module's device."""

    dtype = torch.float32

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, format: str) -> None:
        self.tensors, self.scale, self.format = (codes, scale), scale, format
        self.shape, self.holds = tuple(codes.shape), codes.dtype

    def held(self, device: torch.device) -> torch.Tensor:
        return self.tensors[0].to(device)

    def read(self, device: torch.device = _CPU) -> torch.Tensor:
        codes, scale = (tensor.to(device) for tensor in self.tensors)
        return dequantize(codes, scale, self.dtype, dtypes.BY_NAME[self.format].blocks)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        codes, scale = (tensor.to(ids.device) for tensor in self.tensors)
        return dequantized_rows(codes, scale, self.format, ids, self.dtype)


class EncodedValues(StoredValues):
    """A weight that another program quantised. The module holds a placeholder in its place, which takes the memory of one element.

    holds: the dtype of the placeholder: that of the weight in a model that is not quantised. turned: whether the weight's last two
    dimensions are exchanged in the module.
    """

    dtype = torch.float32
    decoded = True

    def __init__(self, weight: EncodedWeight, holds: torch.dtype, turned: bool = False) -> None:
        self.weight, self.holds, self.turned = weight, holds, turned
        self.shape = (*weight.shape[:-2], *weight.shape[:-3:-1]) if turned else weight.shape
        self.format = weight.format

    @cached_property
    def _parts(self) -> dict[str, torch.Tensor]:
        return {role: read_part(part) for role, part in self.weight.parts.items()}

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return tuple(self._parts.values())

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def held(self, device: torch.device) -> torch.Tensor:
        return placeholder(self.shape, self.holds, device)

    def read(self, device: torch.device = _CPU) -> torch.Tensor:
        values = schemes.decode(self.weight, self._parts).to(device)
        return values.transpose(-1, -2).contiguous() if self.turned else values

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        wanted, places = torch.unique(ids.reshape(-1), return_inverse=True)
        values = torch.empty((len(wanted), *self.shape[1:]))
        runs = torch.tensor_split(wanted.cpu(), ((wanted.diff() != 1).nonzero().flatten() + 1).cpu())
        at = 0
        for run in runs if len(wanted) else ():
            first = int(run[0])
            values[at : at + len(run)] = schemes.decode(self.weight, self._parts, first, first + len(run))
            at += len(run)
        return values.to(ids.device)[places].view(*ids.shape, *self.shape[1:])


class StackedValues(StoredValues):
    """Values of several stored tensors that loading packs into one weight, such as the experts of a layer, some of which another
    program quantised.

    parts: the values of each, in the order in which they follow each other in the weight's memory. shape: the weight's shape.
    """

    dtype = torch.float32
    decoded = True

    def __init__(self, parts: Sequence[StoredValues], shape: tuple[int, ...], holds: torch.dtype) -> None:
        self.parts, self.shape, self.holds = tuple(parts), shape, holds
        self.format = next(part.format for part in parts if part.decoded)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return tuple(tensor for part in self.parts for tensor in part.tensors)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def held(self, device: torch.device) -> torch.Tensor:
        return placeholder(self.shape, self.holds, device)

    def read(self, device: torch.device = _CPU) -> torch.Tensor:
        values = torch.empty(self.shape, dtype=self.dtype, device=device)
        flat, at = values.view(-1), 0
        for part in self.parts:
            read = part.read(device).reshape(-1)
            flat[at : at + len(read)] = read
            at += len(read)
        return values

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids, self.read(ids.device))


def placeholder(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of any shape that takes the memory of one element. It is NaN, so that a result shows if it was used."""
    return torch.full((1,), torch.nan, device=device).to(dtype).expand(shape)


def dequantized_rows(
    table: torch.Tensor, scale: torch.Tensor, storage: str, ids: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return some rows of an embedding table [rows, width] that is stored in the format `storage`, dequantized to `dtype`:
    [*ids.shape, width].

    ids: the indexes of the rows. scale: the scales of the whole table.
    """
    index = ids.reshape(-1)
    rows = table.view(torch.uint8).index_select(0, index).view(table.dtype)
    blocks = dtypes.BY_NAME[storage].blocks
    if blocks is not None:
        rows = dequantize(rows, scale[index // blocks.rows], dtype, dataclasses.replace(blocks, rows=1))
    else:
        rows = dequantize(rows, scale[index] if len(scale) == len(table) else scale, dtype)
    return rows.view(*ids.shape, table.shape[1])
