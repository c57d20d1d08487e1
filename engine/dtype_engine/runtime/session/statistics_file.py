"""Reads and writes files with the statistics of the inputs of a model's weights over calibration inputs.

A file is a safetensors file of float32 tensors. Each is named by a hash of its content, so that what several weights have in
common, such as q, k and v, is there once. The metadata has an index, in JSON: which tensors belong to which weight.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec
import torch

from dtype_engine.checkpoint import CheckpointTensor
from dtype_engine.checkpoint.safetensors_header import read_header
from dtype_engine.core.atomic_write import write_atomic
from dtype_engine.core.errors import UserError
from dtype_engine.core.number_ranges import Count, Positive
from dtype_engine.core.regular_files import open_regular, reading
from dtype_engine.core.roundings import Statistic
from dtype_engine.core.typed_data import json_as_type
from dtype_engine.runtime.numerics.roundings import InputStatistics, WeightStatistics

_INDEX = "input_statistics"
"""The key of the index in the metadata."""
_PIECE_BYTES = 1 << 20


class _Part(msgspec.Struct, array_like=True):
    """The saved form of an entry of `WeightStatistics.parts`. Tensors are given by their names in the file."""

    index: Count | None
    tokens: Positive
    squares: str
    products: str | None


class _Weight(msgspec.Struct, array_like=True):
    """The saved form of a `WeightStatistics`. It has no parts if no matrix product of the calibration runs used the weight."""

    across: Literal[0, 1]
    parts: list[_Part]


class _Index(msgspec.Struct):
    fingerprint: str
    weights: dict[str, _Weight]


@dataclass
class SavedFile:
    """A file that is open for reading, or none yet, which has no statistics."""

    file: BinaryIO | None = None
    tensors: Mapping[str, CheckpointTensor] = field(default_factory=dict)
    weights: Mapping[str, _Weight] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, fingerprint: str) -> SavedFile:
        """Open the file at `path` if there is one. Raises UserError if it is damaged, or another program's, or has another
        fingerprint.
        """
        with reading(path):
            try:
                file = open_regular(path)
            except (FileNotFoundError, NotADirectoryError):
                return cls()
        try:
            tensors, metadata = read_header(path)
            with reading(path):
                if not os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                    raise UserError("another process has just replaced it")
            index = json_as_type(metadata.get(_INDEX, "").encode(), _Index)
            if index.fingerprint != fingerprint:
                raise UserError("it is of another model or other inputs")
            for weight in index.weights.values():
                _check(weight, tensors)
        except BaseException:
            file.close()
            raise
        return cls(file, tensors, index.weights)

    @property
    def nbytes(self) -> int:
        """The number of bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def start(self) -> int:
        """The offset at which the bytes of the tensors begin."""
        return min((tensor.start or 0 for tensor in self.tensors.values()), default=0)

    def has(self, name: str, need: Statistic) -> bool:
        """Return whether the file has what a rounding needs of a weight, or says that no matrix product uses the weight."""
        weight = self.weights.get(name)
        return weight is not None and (need == "squares" or all(part.products is not None for part in weight.parts))

    def read(self, name: str, need: Statistic, device: torch.device) -> WeightStatistics | None:
        """Return the statistics of a weight for which `has` is True, on `device`. None if no matrix product uses the weight. Raises
        UserError if the file can't be read.
        """
        weight, taken = self.weights[name], dict[str, torch.Tensor]()
        if not weight.parts:
            return None

        def take(key: str) -> torch.Tensor:
            if key not in taken:
                taken[key] = self._take(self.tensors[key]).to(device)
            return taken[key]

        parts = {
            part.index: InputStatistics(
                take(part.squares),
                take(part.products) if need == "products" and part.products is not None else None,
                part.tokens,
            )
            for part in weight.parts
        }
        return WeightStatistics(weight.across, parts)

    def _take(self, tensor: CheckpointTensor) -> torch.Tensor:
        assert self.file is not None
        buffer = bytearray(tensor.nbytes)
        with reading(tensor.file):
            self.file.seek(tensor.start or 0)
            if self.file.readinto(buffer) < tensor.nbytes:  # type: ignore[attr-defined]
                raise UserError(f"{tensor.file} was cut short while it was read; remove it")
        return torch.frombuffer(buffer, dtype=torch.float32).view(tensor.shape)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def _check(weight: _Weight, tensors: Mapping[str, CheckpointTensor]) -> None:
    """Raise UserError unless the file has the tensors of a weight, with channels for all of them."""
    for part in weight.parts:
        squares = tensors.get(part.squares)
        shapes = [(part.squares, 1)] if part.products is None else [(part.squares, 1), (part.products, 2)]
        for key, dimensions in shapes:
            tensor = tensors.get(key)
            if tensor is None or squares is None or tensor.dtype != "float32":
                raise UserError("tensors of its index are missing")
            if tensor.shape != (math.prod(squares.shape),) * dimensions:
                raise UserError("tensors of its index have other shapes")


class Additions:
    """What a new version of a file gets beside what the file before had. New tensors wait in a temporary file, so memory does not
    grow. room: the most bytes of products that are added. Raises OSError if the temporary file can't be made.
    """

    def __init__(self, before: SavedFile, folder: Path, room: int) -> None:
        self.before = before
        self.without_products: list[str] = []
        """The names of the weights whose products are left out because there is no room."""
        self._room = room
        self._waiting = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115, it outlives this method
        self._nbytes = 0
        self._weights: dict[str, _Weight] = {}
        self._tensors: dict[str, tuple[int, ...]] = {}
        """The shapes of the new tensors by name, in the order in which they were written."""

    def add(self, name: str, given: WeightStatistics) -> None:
        """Add the statistics of a weight. Raises OSError if there is no space on the disk."""
        needed = sum(part.products.nbytes for part in given.parts.values() if part.products is not None)
        fits = self._nbytes + needed <= self._room
        if not fits:
            self.without_products.append(name)
        self._weights[name] = _Weight(
            1 if given.across == 1 else 0,
            [
                _Part(
                    index,
                    part.tokens,
                    self._put(part.squares),
                    self._put(part.products) if fits and part.products is not None else None,
                )
                for index, part in given.parts.items()
            ],
        )

    def add_unused(self, names: Iterable[str]) -> None:
        """Add weights that no matrix product of the calibration runs used."""
        self._weights |= {name: _Weight(1, []) for name in names}

    def __bool__(self) -> bool:
        """Return whether anything was added."""
        return bool(self._weights)

    def write(self, path: Path, fingerprint: str) -> None:
        """Write what the file before had and what was added. Raises UserError if the file can't be written."""
        write_atomic(path, self._content(fingerprint), replace=True, mode=0o600)

    def close(self) -> None:
        self._waiting.close()

    def _put(self, tensor: torch.Tensor) -> str:
        values = tensor.float().contiguous().cpu()
        key = hashlib.sha256(f"{tuple(values.shape)}".encode())
        key.update(values.numpy().data)
        name = key.hexdigest()[:32]
        if name not in self._tensors and name not in self.before.tensors:
            self._waiting.write(values.numpy().data)
            self._tensors[name] = tuple(values.shape)
            self._nbytes += values.nbytes
        return name

    def _content(self, fingerprint: str) -> Iterator[bytes]:
        index = _Index(fingerprint, {**self.before.weights, **self._weights})
        header: dict[str, object] = {"__metadata__": {_INDEX: msgspec.json.encode(index).decode()}}
        for name, tensor in self.before.tensors.items():
            start = (tensor.start or 0) - self.before.start
            header[name] = _entry(tensor.shape, start, tensor.nbytes)
        at = self.before.nbytes
        for name, shape in self._tensors.items():
            nbytes = 4 * math.prod(shape)
            header[name] = _entry(shape, at, nbytes)
            at += nbytes
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)
        yield len(encoded).to_bytes(8, "little") + encoded
        if self.before.file is not None and self.before.tensors:
            yield from _pieces(self.before.file, self.before.start)
        self._waiting.flush()
        yield from _pieces(self._waiting, 0)


def _entry(shape: tuple[int, ...], start: int, nbytes: int) -> dict[str, object]:
    return {"dtype": "F32", "shape": list(shape), "data_offsets": [start, start + nbytes]}


def _pieces(file: BinaryIO, start: int) -> Iterator[bytes]:
    file.seek(start)
    while piece := file.read(_PIECE_BYTES):
        yield piece
