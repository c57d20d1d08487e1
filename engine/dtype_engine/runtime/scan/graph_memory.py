"""What the autograd graph of a scan keeps: activations, and either the values of weights or only which weights to read again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch.autograd.graph import saved_tensors_hooks

from dtype_engine.runtime.libraries.torch_private import version_of
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.model.weight import Weight
from dtype_engine.runtime.modes.reference import reference_part, reference_value
from dtype_engine.runtime.scan.kept_tensors import ActivationFile, KeptTensor, is_keepable, value_of


@dataclass(frozen=True, slots=True)
class WeightView:
    """Describes a tensor that shares memory with values that the pass has read of a weight."""

    key: int
    """The `id` of the weight's tensor."""
    index: int | None
    """The only index of the weight's first dimension that was read, or None if the whole weight was read."""
    dtype: torch.dtype
    version: int
    """torch's version counter of the values when they were read. It reveals later writes."""


@dataclass(frozen=True, slots=True)
class _Remembered:
    """Stands for a view of a weight's values in an autograd graph that holds no weights."""

    weight: Weight
    index: int | None
    block: str
    """The name of the model's block (such as a decoder layer) in which the weight was used."""
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    """The index of the view's first element in the memory of the values."""


@dataclass(eq=False)
class GraphMemory:
    """Keeps the tensors that the backward passes of a scan need."""

    model: LiveModel
    rereads: bool
    """Whether the autograd graph leaves out the copies of weights that a reference run widens or decodes, because they would take
    too much memory. The backward passes then make these copies again. Always True for a model that is larger than memory.
    """
    enter_block: Callable[[str], None]
    """Called before a backward pass reads weights of another block of a model that is larger than memory."""
    file: ActivationFile | None
    """The file in which activations are kept, or None if they stay in memory."""

    def __post_init__(self) -> None:
        self.rereads = self.rereads or self.model.memory.limited
        self._views: dict[int, WeightView] = {}
        """The weights whose values the running operation uses, by the address of the values' memory."""

    @property
    def block(self) -> str:
        """The name of the block (such as a decoder layer) that is running, or "" if the model is not larger than memory."""
        return "" if not self.model.memory.limited else self.model.memory.inside

    def saving(self) -> AbstractContextManager[object]:
        """Return a context manager for the forward pass. In it, if `rereads`, autograd's graph stores which weights it needs,
        and not their values, which are read again in the backward pass.
        """
        return saved_tensors_hooks(self._remembered, self._read_again) if self.rereads else nullcontext()

    @contextmanager
    def using(self, views: Iterable[tuple[torch.Tensor, WeightView]]) -> Iterator[None]:
        """Return a context manager for one operation, in which `view_of` knows `views`: pairs (values of a weight that the
        operation uses, their `WeightView`).
        """
        self._views = {tensor.untyped_storage().data_ptr(): view for tensor, view in views}
        try:
            yield
        finally:
            self._views = {}  # a pass that waits for others must not keep a weight in memory

    def view_of(self, tensor: torch.Tensor) -> WeightView | None:
        """Return the `WeightView` of the weight with which a tensor shares memory, if the running operation uses it, or None."""
        return self._views.get(tensor.untyped_storage().data_ptr()) if self._views else None

    def keep(self, tensor: torch.Tensor, kept: dict[int, KeptTensor]) -> torch.Tensor:
        """Return `tensor` or, if it is to be written to the file, a placeholder without memory. In that case, the record of the
        tensor is added to `kept`, keyed by the `id` of the placeholder.
        """
        if self.file is None or not is_keepable(tensor):
            return tensor
        stand_in = torch.empty_like(tensor, device="meta")
        kept[id(stand_in)] = self.file.keep(tensor, self.block)
        return stand_in

    def _remembered(self, tensor: torch.Tensor) -> KeptTensor | _Remembered:
        found = self.view_of(tensor)
        # The values that the model has written after they were read are not those of the files.
        if found is None or found.dtype != tensor.dtype or version_of(tensor) != found.version:
            return KeptTensor.of(tensor) if self.file is None else self.file.keep(tensor, self.block)
        weight, offset = self.model.by_id[found.key], int(tensor.storage_offset())
        return _Remembered(weight, found.index, self.block, tensor.shape, tensor.stride(), offset)

    def _read_again(self, saved: KeptTensor | _Remembered) -> torch.Tensor:
        if isinstance(saved, KeptTensor):
            return value_of(saved) if self.file is None else self.file.load(saved)
        if saved.block:
            self.enter_block(saved.block)
        part = None if saved.index is None else reference_part(saved.weight, saved.index)
        value = reference_value(saved.weight, saved.weight.tensor.device) if part is None else part
        return value.as_strided(saved.shape, saved.strides, saved.offset)
