"""Keeps the activations that the backward passes of a scan need: those in the autograd graph, and the arguments and outputs of the
recorded operations. They stay in memory or, if they take too much of it, are written to a temporary file.

`torch.autograd.graph.save_on_cpu` moves activations in a similar way, but writes a tensor once for each operation that uses it, and
only to the memory of the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dtype_engine.core.system_memory import trim_heap
from dtype_engine.runtime.libraries.torch_private import is_wrapped, storage_id, version_of
from dtype_engine.runtime.weights.temporary_file import TemporaryFile

_SMALLEST = 1 << 12
"""Tensors of fewer bytes stay in memory."""
_ALIGNED = 16
"""The memory that is written begins at a multiple of this many bytes, which is a multiple of the size of every dtype."""


@dataclass(slots=True, eq=False)
class KeptTensor:
    """A tensor that a backward pass needs, with the values that it had when it was kept."""

    tensor: torch.Tensor | None
    """The tensor, or None once it has been written to the file."""
    version: int
    """torch's version counter of the tensor when it was kept. It reveals later writes."""
    block: str = ""
    """The name of the model's block (such as a decoder layer) that was running."""
    overwritten: bool = False
    """Whether the model had changed the tensor before it was written to the file."""
    place: _Place | None = None

    @staticmethod
    def of(tensor: torch.Tensor, block: str = "") -> KeptTensor:
        """Return a record of a tensor that stays in memory until `ActivationFile` writes it. block: the running block's name."""
        if not is_wrapped(tensor):
            with torch.no_grad():
                tensor = tensor.detach()  # a tensor with a graph would keep this graph in memory for ever
        return KeptTensor(tensor, version_of(tensor), block)

    @property
    def changed(self) -> bool:
        """Whether the model changed the tensor's values after the tensor was kept and before it was written to the file."""
        return self.overwritten or (self.tensor is not None and version_of(self.tensor) != self.version)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor is in the file."""

    start: int
    """The offset in the file, in bytes, of the memory that the tensor shares with others."""
    nbytes: int
    dtype: torch.dtype
    device: torch.device
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    """The index of the tensor's first element in the memory that is in the file."""


def is_keepable(tensor: torch.Tensor) -> bool:
    """Return whether `ActivationFile` can write a tensor to a file and read it back."""
    plain = tensor.layout is torch.strided and not tensor.is_nested and not is_wrapped(tensor)
    return plain and tensor.device.type != "meta" and not tensor.is_conj() and not tensor.is_neg()


class ActivationFile(TemporaryFile):
    """A temporary file with the activations of one sequence.

    The tensors that one block of the model keeps are written when the next block keeps a tensor, or once they take `most` bytes.
    Tensors that have been read stay in memory up to the same size. Tensors that share memory are written together. Raises UserError
    if the file can't be written.
    """

    def __init__(self, most: int = 1 << 62) -> None:
        super().__init__(instead="scan shorter sequences or fewer dtypes")
        self.most = most
        self._waiting: list[KeptTensor] = []
        self._waiting_bytes = 0
        self._read: dict[int, torch.Tensor] = {}
        """The bytes that `load` has read back for the current block's backward pass, by their offset in the file."""
        self._read_bytes = 0
        self._reading = ""

    def keep(self, tensor: torch.Tensor, block: str) -> KeptTensor:
        """Keep a tensor with which `block` computes. It stays in memory until it is written."""
        if self._waiting and (self._waiting[-1].block != block or self._waiting_bytes > self.most):
            self.write()
        kept = KeptTensor.of(tensor, block)
        if is_keepable(tensor) and tensor.nbytes >= _SMALLEST:
            self._waiting.append(kept)
            self._waiting_bytes += tensor.nbytes
        return kept

    def write(self) -> None:
        """Write all tensors that are still in memory, and release them."""
        shared: dict[int, list[KeptTensor]] = {}
        for kept in self._waiting:
            assert kept.tensor is not None
            shared.setdefault(storage_id(kept.tensor), []).append(kept)
        self._waiting, self._waiting_bytes = [], 0
        for together in shared.values():
            spans: dict[tuple[int, int], list[KeptTensor]] = {}
            for kept in together:
                spans.setdefault(_span(kept.tensor), []).append(kept)
            first, last = min(start for start, _ in spans), max(end for _, end in spans)
            if last - first <= 2 * sum(end - start for start, end in spans):
                spans = {(first, last): together}  # otherwise they are far apart, such as weights in a mapped file
            for (start, end), there in spans.items():
                self._write_span(there, start, end)
        trim_heap()  # each pass has a thread, and glibc keeps up to 64 MiB of freed memory for each

    def _write_span(self, together: list[KeptTensor], first: int, last: int) -> None:
        memory = together[0].tensor
        assert memory is not None
        place = self.append(_bytes_of(memory, first, last))
        for kept in together:
            each = kept.tensor
            assert each is not None
            offset = (int(each.storage_offset()) * each.element_size() - first) // each.element_size()
            kept.overwritten = kept.changed
            kept.place = _Place(place, last - first, each.dtype, each.device, each.shape, each.stride(), offset)
            kept.tensor = None

    def load(self, kept: KeptTensor) -> torch.Tensor:
        """Return a tensor with the values that it had when it was kept. What is read from the file stays in memory until
        `end_block`, or until another block's tensor is loaded. Raises RuntimeError if the model had changed the values before they
        were written.
        """
        if kept.place is None or kept.overwritten:
            return value_of(kept)
        if kept.block != self._reading:
            self.end_block()
            self._reading = kept.block
        place = kept.place
        memory = self._read.get(place.start)
        if memory is None:
            memory = self._read[place.start] = self.bytes_at(place.start, place.nbytes).to(place.device)
            self._read_bytes += place.nbytes
            while self._read_bytes > self.most and len(self._read) > 1:
                self._read_bytes -= self._read.pop(next(iter(self._read))).nbytes
        made = torch.empty(0, dtype=place.dtype, device=place.device)
        return made.set_(memory.untyped_storage(), place.offset, place.shape, place.strides)

    def end_block(self) -> None:
        """Free the tensors that `load` has read back from the file for one block's backward pass. They stay in the file."""
        if self._read:
            self._read.clear()
            self._read_bytes = 0
            trim_heap()

    def clear(self) -> None:
        self._waiting, self._waiting_bytes = [], 0
        self.end_block()
        super().clear()

    def close(self) -> None:
        self._waiting = []
        self.end_block()
        super().close()


def value_of(kept: KeptTensor) -> torch.Tensor:
    """Return a kept tensor that is in memory. Raises RuntimeError if the model has changed its values since."""
    if kept.changed:
        raise RuntimeError("the model has overwritten an activation that the gradient needs")
    assert kept.tensor is not None
    return kept.tensor


def _span(tensor: torch.Tensor | None) -> tuple[int, int]:
    """Return the range (start, end) of bytes that a tensor takes in its memory. The start is a multiple of `_ALIGNED`."""
    assert tensor is not None
    start = int(tensor.storage_offset())
    last = start + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    size = tensor.element_size()
    return start * size // _ALIGNED * _ALIGNED, (last + 1) * size


def _bytes_of(tensor: torch.Tensor, first: int, last: int) -> torch.Tensor:
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return memory.set_(tensor.untyped_storage(), first, (last - first,), (1,)).cpu()
