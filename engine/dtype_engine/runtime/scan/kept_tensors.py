"""Keeps the activations that the backward passes of a scan need: those in the autograd graph, and the arguments and outputs of the
recorded operations. They stay in memory or, if they take too much of it, are written to a temporary file. The file also keeps the
weights that a scan has rounded.

`torch.autograd.graph.save_on_cpu` moves activations in a similar way, but writes a tensor once for each operation that uses it, and
only to the memory of the CPU.
"""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from dataclasses import dataclass, replace

import torch

from dtype_engine.core.errors import UserError
from dtype_engine.core.system_memory import trim_heap
from dtype_engine.runtime.libraries.torch_private import is_wrapped, storage_id, version_of

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
    def start(self) -> int:
        """The offset in the file, in bytes, of a tensor that has been written to it."""
        assert self.place is not None
        return self.place.start

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


class ActivationFile:
    """A temporary file with the activations of one sequence. It is in the folder of the environment variable TMPDIR, or else in
    /var/tmp, because /tmp often is in memory. The system removes it when it is closed, also after a crash.

    The tensors that one block of the model keeps are written when the next block keeps a tensor, or once they take `most` bytes.
    Tensors that have been read stay in memory up to the same size. Tensors that share memory are written together. Raises UserError
    if the file can't be written.

    path: the `path` of another process's file, which is then only read. Raises OSError if it can't be opened.
    """

    def __init__(self, most: int = 1 << 62, path: str | None = None) -> None:
        self.nbytes = 0
        self.most = most
        self._waiting: list[KeptTensor] = []
        self._waiting_bytes = 0
        self._read: dict[int, torch.Tensor] = {}
        """The bytes that `load` has read back for the current block's backward pass, by their offset in the file."""
        self._read_bytes = 0
        self._reading = ""
        if path is not None:
            self._file: io.RawIOBase = open(path, "rb", buffering=0)  # noqa: SIM115
            return
        try:
            self._file = tempfile.TemporaryFile(prefix="dtype-engine-", buffering=0, dir=_folder())  # noqa: SIM115
        except OSError as error:
            raise _no_room(error) from error

    @property
    def path(self) -> str | None:
        """The path by which other processes of this machine can open the file while this one lives, or None if the system has none
        for a file without a name.
        """
        path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
        return path if os.path.exists(path) else None

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
        place = self._append(_bytes_of(memory, first, last))
        for kept in together:
            each = kept.tensor
            assert each is not None
            offset = (int(each.storage_offset()) * each.element_size() - first) // each.element_size()
            kept.overwritten = kept.changed
            kept.place = _Place(place, last - first, each.dtype, each.device, each.shape, each.stride(), offset)
            kept.tensor = None

    def put(self, vector: torch.Tensor, instead_of: KeptTensor | None = None) -> KeptTensor:
        """Write a vector [n], and return its record. instead_of: the record of a vector of the same size and dtype to overwrite."""
        data = vector.contiguous().view(torch.uint8).cpu()
        if instead_of is not None and instead_of.place is not None:
            self._write_at(instead_of.place.start, data)
            return instead_of
        return self.record(self._append(data), len(vector), vector.dtype, vector.device)

    def record(self, start: int, count: int, dtype: torch.dtype, device: torch.device) -> KeptTensor:
        """Return the record of a vector that `put` has written at the offset `start`, perhaps in another process."""
        place = _Place(start, count * dtype.itemsize, dtype, device, torch.Size((count,)), (1,), 0)
        return KeptTensor(None, 0, place=place)

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
            memory = self._read[place.start] = self._bytes_at(place).to(place.device)
            self._read_bytes += place.nbytes
            while self._read_bytes > self.most and len(self._read) > 1:
                self._read_bytes -= self._read.pop(next(iter(self._read))).nbytes
        made = torch.empty(0, dtype=place.dtype, device=place.device)
        return made.set_(memory.untyped_storage(), place.offset, place.shape, place.strides)

    def take(self, kept: KeptTensor, part: slice | None = None) -> torch.Tensor:
        """Return the vector for which `put` returned the record `kept`, or only its elements from `part.start` up to `part.stop`.
        The caller may change the vector.
        """
        place = kept.place
        assert place is not None
        if part is not None:
            size = place.nbytes // max(1, place.shape[0])
            place = replace(place, start=place.start + size * part.start, nbytes=size * (part.stop - part.start))
        return self._bytes_at(place).view(place.dtype).to(place.device)

    def end_block(self) -> None:
        """Free the tensors that `load` has read back from the file for one block's backward pass. They stay in the file."""
        if self._read:
            self._read.clear()
            self._read_bytes = 0
            trim_heap()

    def clear(self) -> None:
        """Remove everything from the file. Tensors that were kept can no longer be loaded."""
        self._waiting, self._waiting_bytes, self.nbytes = [], 0, 0
        self.end_block()
        self._file.truncate(0)

    def close(self) -> None:
        self._waiting = []
        self.end_block()
        self._file.close()

    def _append(self, data: torch.Tensor) -> int:
        start = self.nbytes
        self._write_at(start, data)
        self.nbytes += len(data)
        return start

    def _write_at(self, start: int, data: torch.Tensor) -> None:
        view, done = data.numpy().data, 0
        try:
            self._file.seek(start)
            while done < len(view):
                done += self._file.write(view[done:])
        except OSError as error:
            raise _no_room(error) from error

    def _bytes_at(self, place: _Place) -> torch.Tensor:
        made = torch.empty(place.nbytes, dtype=torch.uint8)
        view, done = made.numpy().data, 0
        try:
            self._file.seek(place.start)
            while done < place.nbytes:
                count = self._file.readinto(view[done:])
                if not count:
                    raise UserError(f"{_folder()}: the scan's temporary file has lost its end: scan again")
                done += count
        except OSError as error:
            raise UserError(
                f"{_folder()}: the scan can't read its temporary file ({error.strerror}): scan again"
            ) from error
        return made


def value_of(kept: KeptTensor) -> torch.Tensor:
    """Return a kept tensor that is in memory. Raises RuntimeError if the model has changed its values since."""
    if kept.changed:
        raise RuntimeError("the model has overwritten an activation that the gradient needs")
    assert kept.tensor is not None
    return kept.tensor


def free_for_activations() -> int:
    """Return how many bytes are free where `ActivationFile` writes."""
    try:
        return shutil.disk_usage(_folder()).free
    except OSError:
        return 0


def _folder() -> str:
    large = "/var/tmp"
    if "TMPDIR" not in os.environ and os.access(large, os.W_OK):
        return large
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        return os.curdir


def _no_room(error: OSError) -> UserError:
    return UserError(
        f"{_folder()}: the scan can't write its temporary file here ({error.strerror}): set TMPDIR to a folder with more space, "
        "or scan shorter sequences or fewer dtypes"
    )


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
