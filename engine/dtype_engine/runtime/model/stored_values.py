"""Reads the stored values of a weight of a running model, from which every cast starts. They come from plain values, from codes
with scales of this program, or from tensors that another program quantized.

Stored values are never written to. A weight that another program quantized is decoded to float32 each time its values are read. The
decoded values are not kept, so the weight takes no more memory than its tensors in the files.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property

import msgspec
import torch
from torch.nn import functional

from dtype_engine.checkpoint import CheckpointTensor, QuantizedWeight
from dtype_engine.checkpoint.schemes import EncodedWeight
from dtype_engine.core import dtypes
from dtype_engine.core.errors import NoForward
from dtype_engine.core.text import printable
from dtype_engine.runtime.device import copied_to
from dtype_engine.runtime.formats import schemes
from dtype_engine.runtime.model.mmap_reader import read_part, read_quantized
from dtype_engine.runtime.model.visits import MOST_KEPT, BlockVisits
from dtype_engine.runtime.numerics.activations import InputFormat
from dtype_engine.runtime.numerics.quantize import dequantize, torch_dtype

_CPU = torch.device("cpu")


class StoredValues(ABC):
    """The values of one weight as the files store them. If Python code has built the module, they are the values from when it was
    opened.
    """

    shape: tuple[int, ...]
    """The shape of the weight in the module."""
    dtype: torch.dtype
    """The dtype of the values that `read` and `rows` return."""
    holds: torch.dtype
    """The dtype of the tensor that the module holds while the weight is not cast, whether this tensor has values, codes or
    placeholder data.
    """
    tensors: tuple[torch.Tensor, ...]
    """The tensors from which the values are computed, such as codes and scales, as the files store them."""
    scale: torch.Tensor | None = None
    """The scales of the codes that the module holds, on the module's device. None if it holds no codes."""
    format: str = ""
    """The name of the format if the files store the weight as codes, such as "gptq:int4@g128". Otherwise ""."""
    input_format: InputFormat | None = None
    """How runtimes round the activations that the weight multiplies, as the files declare, or None if they do not."""
    decoded: bool = False
    """True if the module holds only a placeholder, so that each operation has to read or decode the values."""
    has_parts: bool = False
    """True if `part` can read the values at one index of the weight's first dimension, such as those of one expert, without the
    others.
    """
    in_files: tuple[CheckpointTensor, ...] = ()
    """The headers of the tensors that are read from files at each use of the values. Empty if the values stay in memory."""

    @property
    def plain(self) -> bool:
        """True if the module holds the values themselves while the weight is not cast, neither codes nor a placeholder."""
        return self.scale is None and not self.decoded

    @property
    def nbytes(self) -> int:
        """The number of bytes that the weight takes in the files."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @abstractmethod
    def held(self, device: torch.device) -> torch.Tensor:
        """Return the tensor that a module on `device` holds while the weight is not cast. It has the weight's shape, and contains
        values, codes or placeholder data.
        """

    @abstractmethod
    def read(self, device: torch.device = _CPU) -> torch.Tensor:
        """Return all values, in the weight's shape and in `dtype`, on `device`. Raises UserError if a file can't be read."""

    @abstractmethod
    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows of an embedding table [rows, width], on the device of `ids`: [*ids.shape, width]. ids: the indexes of the
        rows.
        """

    def part(self, index: int, device: torch.device) -> torch.Tensor | None:
        """Return the values at one index of the weight's first dimension, such as those of one expert. Returns None if there is
        no such index, or if they can't be read without the others (`has_parts`).
        """
        return None

    def slice_of(self, rows: slice, device: torch.device) -> torch.Tensor:
        """Return the values at some indexes of the weight's first dimension. If it is possible, the others are not decoded. rows:
        a slice without a step, within the weight.
        """
        return self.read(device)[rows]

    def coded(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (values, None) or, for a weight that an export of this program stored with scales, (codes, scales)."""
        return self.read(device), None

    def release(self) -> None:  # noqa: B027
        """Drop the mappings of the files, so that their pages can leave the memory. Reading the values maps the files again."""


class PlainValues(StoredValues):
    """A weight that is stored as plain values, usually memory-mapped from a file. Reading it copies nothing, unless it moves the
    values to another device.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensors = (tensor,)
        self.shape, self.dtype, self.holds = tuple(tensor.shape), tensor.dtype, tensor.dtype

    def held(self, device: torch.device) -> torch.Tensor:
        return self.tensors[0].to(device)

    def read(self, device: torch.device = _CPU) -> torch.Tensor:
        return self.held(device)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        table = self.tensors[0]  # if it is in a file, only its rows go to the accelerator
        return functional.embedding(ids.to(table.device), table).to(ids.device)


class QuantizedValues(StoredValues):
    """A weight that this program exported as codes with scales. scale: the scales, on the module's device. format: the name of the
    format in `core.dtypes`, such as "int8".
    """

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
    """A weight that another program quantized. The module holds a placeholder for it, which takes the memory of one element.

    holds: the dtype of the placeholder, which is the dtype that the weight would have in an unquantized model. turned: whether the
    weight's last two dimensions are exchanged in the module. inputs: the format to which runtimes round the activations that the
    weight multiplies, as `schemes.input_activations` tells it, or "".
    """

    dtype = torch.float32
    decoded = True

    def __init__(self, weight: EncodedWeight, holds: torch.dtype, turned: bool = False, inputs: str = "") -> None:
        self.weight, self.holds, self.turned, self._inputs = weight, holds, turned, inputs
        self.shape = (*weight.shape[:-2], *weight.shape[:-3:-1]) if turned else weight.shape
        self.format = weight.format
        self.in_files = weight.tensors

    @cached_property
    def input_format(self) -> InputFormat | None:  # type: ignore[override]
        """As in `StoredValues`. Raises NoForward if the scale of the inputs is no positive number."""
        dtype, stored = self._inputs, self.weight.input_scale
        if not dtype.endswith((dtypes.PER_TENSOR, "nvfp4")) or stored is None:
            return InputFormat(dtype) if dtype else None
        scale = float(read_part(stored).float().max())
        if not 0 < scale < math.inf:
            raise NoForward(f"{printable(stored.name)} is {scale}, which can't be a scale of inputs")
        return InputFormat(dtype, 1 / scale if self.weight.scheme.reciprocal_scales and dtype == "nvfp4" else scale)

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

    def slice_of(self, rows: slice, device: torch.device) -> torch.Tensor:
        if self.turned or len(self.shape) != 2:
            return super().slice_of(rows, device)
        return schemes.decode(self.weight, self._parts, rows.start, rows.stop).to(device)

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

    def release(self) -> None:
        self.__dict__.pop("_parts", None)


class InFileValues(StoredValues):
    """A weight of plain values that stays in its file. Each read maps the file again. Used for models larger than memory."""

    decoded = True

    def __init__(self, stored: CheckpointTensor) -> None:
        self.in_files = (stored,)
        self.shape, self.dtype = stored.shape, torch_dtype(stored.dtype)
        self.holds, self.has_parts = self.dtype, len(stored.shape) > 2

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return (self.read(),)

    @property
    def nbytes(self) -> int:
        return self.in_files[0].nbytes

    def held(self, device: torch.device) -> torch.Tensor:
        return placeholder(self.shape, self.holds, device)

    def read(self, device: torch.device = _CPU) -> torch.Tensor:
        return copied_to(read_part(self.in_files[0]), device)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids.cpu(), self.read()).to(ids.device)

    def part(self, index: int, device: torch.device) -> torch.Tensor | None:
        return self.read()[index].to(device) if self.has_parts and 0 <= index < self.shape[0] else None


class QuantizedInFile(StoredValues):
    """A weight that an export of this program stored as codes with scales, and that stays in its file: each read maps the file
    again. Used for models larger than memory.
    """

    dtype = torch.float32
    decoded = True

    def __init__(self, weight: QuantizedWeight) -> None:
        self.weight, self.shape, self.format = weight, weight.shape, weight.dtype
        self.holds, self.in_files = torch_dtype(weight.dtype), tuple(weight.parts.values())
        self.scale = torch.ones(1)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return read_quantized(self.weight)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.in_files)

    def held(self, device: torch.device) -> torch.Tensor:
        return placeholder(self.shape, self.holds, device)

    def coded(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scale = read_quantized(self.weight)
        return copied_to(codes, device), copied_to(scale, device)

    def read(self, device: torch.device = _CPU) -> torch.Tensor:
        return dequantize(*self.coded(device), self.dtype, dtypes.BY_NAME[self.format].blocks)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        codes, scale = read_quantized(self.weight)
        return dequantized_rows(codes, scale, self.format, ids.cpu(), self.dtype).to(ids.device)


class StackedValues(StoredValues):
    """A weight that loading packs from several stored tensors, such as the experts of a layer. Used if another program quantized
    any of these tensors, or if the model is larger than memory.

    parts: the values of the stored tensors, in the order in which they follow each other in the weight's memory. shape: the
    weight's shape. holds: the dtype of the placeholder in the module.
    """

    decoded = True

    def __init__(self, parts: Sequence[StoredValues], shape: tuple[int, ...], holds: torch.dtype) -> None:
        self.parts, self.shape, self.holds = tuple(parts), shape, holds
        self.format = next((part.format for part in parts if part.format), "")
        self.dtype = torch.float32 if self.format else holds
        self.has_parts = len(shape) > 2 and len(self.parts) % shape[0] == 0
        self.in_files = tuple(tensor for part in parts for tensor in part.in_files)

    @cached_property
    def input_format(self) -> InputFormat | None:  # type: ignore[override]
        """As in `StoredValues`. The scale is the largest of the parts', as vLLM has one for all experts of a layer."""
        forms = [part.input_format for part in self.parts if part.input_format is not None]
        return max(forms, key=lambda form: form.scale or 0.0, default=None)

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

    def release(self) -> None:
        for part in self.parts:
            part.release()

    def part(self, index: int, device: torch.device) -> torch.Tensor | None:
        if not self.has_parts or not 0 <= index < self.shape[0]:
            return None
        each = len(self.parts) // self.shape[0]
        read = [part.read(device).to(self.dtype) for part in self.parts[index * each : (index + 1) * each]]
        return torch.cat([values.reshape(-1) for values in read]).view(self.shape[1:])


class VisitedValues(StoredValues):
    """The values of a weight of a model that is larger than memory, which runs block by block. While a forward pass is in the
    weight's block, they are read only once.

    values: reads the values from the files. visits: the cache that keeps them until the pass enters the next block.
    """

    decoded = True

    def __init__(self, values: StoredValues, visits: BlockVisits) -> None:
        self.values, self.visits = values, visits
        self.shape, self.dtype, self.holds = values.shape, values.dtype, values.holds
        self.format, self.in_files, self.scale = values.format, values.in_files, values.scale
        # Parts of a smaller weight are not worth reading alone: `blocks` counts on it being read as a whole.
        self.has_parts = values.has_parts and 4 * math.prod(values.shape) > visits.most

    @property
    def input_format(self) -> InputFormat | None:  # type: ignore[override]
        return self.values.input_format

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return self.values.tensors

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def held(self, device: torch.device) -> torch.Tensor:
        return self.values.held(device)

    def read(self, device: torch.device = _CPU) -> torch.Tensor:
        if self.scale is None:
            on_device = device.type != "cpu"
            return self.visits.once((self, device), lambda: self.values.read(device), self.values, ahead=on_device)
        return self.visits.once((self, device), lambda: self._dequantized(device), self.values)

    def coded(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.scale is None:
            return self.read(device), None
        return self.visits.once((self, device, "codes"), lambda: self.values.coded(device), self.values, ahead=True)

    def _dequantized(self, device: torch.device) -> torch.Tensor:
        codes, scale = self.coded(device)
        assert scale is not None
        return dequantize(codes, scale, self.dtype, dtypes.BY_NAME[self.format].blocks)

    def slice_of(self, rows: slice, device: torch.device) -> torch.Tensor:
        if 4 * math.prod(self.shape) <= MOST_KEPT * self.visits.most:
            return super().slice_of(rows, device)  # all is kept for the other sequences
        self.visits.note_use(self.values)
        return self.values.slice_of(rows, device)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        self.visits.note_use(self.values)
        return self.values.rows(ids)

    def part(self, index: int, device: torch.device) -> torch.Tensor | None:
        def read() -> torch.Tensor | None:
            if 4 * math.prod(self.shape) > self.visits.most:  # `blocks` leaves such a weight out of its block's ranges
                self.visits.count((self, index), self.nbytes // self.shape[0])
            return self.values.part(index, device)

        return self.visits.once((self, device, index), read, self.values)

    def release(self) -> None:
        self.values.release()


def placeholder(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of the given shape that takes the memory of only one element. All its values are NaN, so that using them by
    mistake becomes visible.
    """
    return torch.full((1,), torch.nan, device=device).to(dtype).expand(shape)


def dequantized_rows(
    table: torch.Tensor, scale: torch.Tensor, storage: str, ids: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return rows of a quantized embedding table [rows, width], dequantized to `dtype`: [*ids.shape, width].

    table: the codes. scale: the scales of the whole table. storage: the table's format, such as "int8". ids: the indexes of the
    rows.
    """
    index = ids.reshape(-1)
    rows = table.view(torch.uint8).index_select(0, index).view(table.dtype)
    blocks = dtypes.BY_NAME[storage].blocks
    if blocks is not None:
        rows = dequantize(rows, scale[index // blocks.rows], dtype, msgspec.structs.replace(blocks, rows=1))
    else:
        rows = dequantize(rows, scale[index] if len(scale) == len(table) else scale, dtype)
    return rows.view(*ids.shape, table.shape[1])
