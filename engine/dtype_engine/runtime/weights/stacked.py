"""A weight that loading packs from several stored tensors, such as the experts of a layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch.nn import functional

from dtype_engine.runtime.formats.dequantize import torch_dtype
from dtype_engine.runtime.numerics.activations import InputFormat
from dtype_engine.runtime.weights.source import CPU, WeightSource


class StackedSource(WeightSource):
    """A weight that loading packs from several stored tensors. This class is used if any of these tensors is stored as codes, or
    if the model is larger than memory.

    parts: the sources of the stored tensors, in the order in which they follow each other in the weight's memory. holds: the dtype
    of the placeholder in the module. If an export of this program stored all parts in one format, the codes' dtype is used
    instead.
    """

    def __init__(self, parts: Sequence[WeightSource], shape: tuple[int, ...], holds: torch.dtype) -> None:
        self._sources, self.shape = tuple(parts), shape
        self.format = next((part.format for part in parts if part.format), "")
        self.own = all(part.own and part.format == self.format for part in parts)
        self.holds = torch_dtype(self.format) if self.own else holds
        self.dtype = torch.float32 if self.format else holds
        self.has_parts = len(shape) > 2 and len(parts) % shape[0] == 0
        self.in_files = tuple(tensor for part in parts for tensor in part.in_files)
        self.nbytes = sum(part.nbytes for part in parts)

    @cached_property
    def input_format(self) -> InputFormat | None:  # type: ignore[override]
        """How runtimes round the activations that the weight multiplies, or None if the files do not declare it. The scale is the
        largest of the parts' scales, because vLLM has one for all experts of a layer.
        """
        forms = [part.input_format for part in self._sources if part.input_format is not None]
        return max(forms, key=lambda form: form.scale or 0.0, default=None)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(tensor for part in self._sources for tensor in part.tensors)

    def read(self, device: torch.device = CPU) -> torch.Tensor:
        return self._filled(torch.empty(self.shape, dtype=self.dtype, device=device), lambda part: part.read(device))

    def _filled(self, values: torch.Tensor, read: Callable[[WeightSource], torch.Tensor]) -> torch.Tensor:
        flat, at = values.view(-1), 0
        for part in self._sources:
            found = read(part).reshape(-1)
            flat[at : at + len(found)] = found
            at += len(found)
        return values

    def read_in(self, dtype: torch.dtype, device: torch.device = CPU) -> torch.Tensor:
        values = torch.empty(self.shape, dtype=dtype, device=device)
        return self._filled(values, lambda part: part.read_in(dtype, device))

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids, self.read(ids.device))

    def release(self) -> None:
        for part in self._sources:
            part.release()

    def part(self, index: int, device: torch.device) -> torch.Tensor | None:
        if not self.has_parts or not 0 <= index < self.shape[0]:
            return None
        each = len(self._sources) // self.shape[0]
        read = [part.read(device).to(self.dtype) for part in self._sources[index * each : (index + 1) * each]]
        return torch.cat([values.reshape(-1) for values in read]).view(self.shape[1:])
