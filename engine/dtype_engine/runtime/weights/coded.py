"""A weight that is stored as codes, in the scheme of another program or by an export of this one."""

from __future__ import annotations

import math
from functools import cached_property

import torch

from dtype_engine.checkpoint import CheckpointTensor
from dtype_engine.checkpoint.schemes import CodedWeight
from dtype_engine.core import dtypes
from dtype_engine.core.errors import NoForward
from dtype_engine.core.text import printable
from dtype_engine.runtime.device import copied_to
from dtype_engine.runtime.formats import schemes
from dtype_engine.runtime.formats.dequantize import torch_dtype
from dtype_engine.runtime.formats.schemes import own
from dtype_engine.runtime.numerics.activations import InputFormat
from dtype_engine.runtime.weights.files import read_part
from dtype_engine.runtime.weights.source import CPU, WeightSource


class CodedSource(WeightSource):
    """A weight that is decoded to float32 each time its values are read, so that it takes no more memory than in the files.

    holds: the dtype of the module's placeholder, which the weight would have in an unquantized model. If this program stored the
    codes, the placeholder has the dtype of the codes instead, as after a cast to this format. turned: whether the weight's last two
    dimensions are exchanged in the module. inputs: the format to which runtimes round the activations that the weight multiplies,
    according to the scheme, or "" if they do not.
    """

    dtype = torch.float32

    def __init__(
        self, weight: CodedWeight, holds: torch.dtype = torch.float32, turned: bool = False, inputs: str = ""
    ) -> None:
        self.weight, self.turned, self._inputs = weight, turned, inputs
        self.shape = (*weight.shape[:-2], *weight.shape[:-3:-1]) if turned else weight.shape
        self.format, self.own = weight.format, weight.own
        self.holds = torch_dtype(weight.format) if weight.own else holds
        self.in_files, self.nbytes = weight.tensors, weight.nbytes
        self.unit = math.prod(self.shape[1:])
        self._moved: dict[torch.device, dict[str, torch.Tensor]] = {}

    @cached_property
    def input_format(self) -> InputFormat | None:  # type: ignore[override]
        """How runtimes round the activations that the weight multiplies, or None if the files do not declare it. Raises NoForward
        if the scale of the inputs is no positive number.
        """
        if self.own:
            return InputFormat(self.format)
        dtype, stored = self._inputs, self.weight.input_scale
        if not dtype.endswith((dtypes.PER_TENSOR, "nvfp4")) or stored is None:
            return InputFormat(dtype) if dtype else None
        scale = stored_scale(stored)
        if not 0 < scale < math.inf:
            raise NoForward(f"{printable(stored.name)} is {scale}, which can't be a scale of inputs")
        return InputFormat(dtype, 1 / scale if self.weight.scheme.reciprocal_scales and dtype == "nvfp4" else scale)

    @cached_property
    def _parts(self) -> dict[str, torch.Tensor]:
        return {role: read_part(part) for role, part in self.weight.parts.items()}

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(self._parts.values())

    def _parts_on(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Return the stored tensors on a device. On an accelerator, they stay for the next use."""
        if device.type == "cpu":
            return self._parts
        if device not in self._moved:
            self._moved[device] = {role: copied_to(part, device) for role, part in self._parts.items()}
        return self._moved[device]

    def read(self, device: torch.device = CPU) -> torch.Tensor:
        # The decoders of other programs' schemes are written for the CPU.
        values = schemes.decode(self.weight, self._parts_on(device if self.own else CPU)).to(device)
        return values.transpose(-1, -2).contiguous() if self.turned else values

    def read_in(self, dtype: torch.dtype, device: torch.device = CPU) -> torch.Tensor:
        if self.own and not self.turned:
            return own.decode(self.weight, self._parts_on(device), 0, self.shape[0] if self.shape else 1, dtype)
        return super().read_in(dtype, device)

    def elements(self, start: int, count: int) -> torch.Tensor:
        if self.turned or not self.shape or not count:
            return super().elements(start, count)
        unit = max(1, self.unit)
        first, last = start // unit, -(-(start + count) // unit)
        return schemes.decode(self.weight, self._parts, first, last).reshape(-1)[start - first * unit :][:count]

    def rows(self, first: int, last: int, device: torch.device = CPU) -> torch.Tensor:
        if self.turned or len(self.shape) != 2:
            return super().rows(first, last, device)
        return schemes.decode(self.weight, self._parts, first, last).to(device)

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
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
        self._moved.clear()


def stored_scale(stored: CheckpointTensor) -> float:
    """Return the stored scale of a layer's inputs, which is the largest one if the tensor has several."""
    return float(read_part(stored).float().max())
