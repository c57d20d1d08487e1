"""Reads the header of a GGUF file (ggml's docs/gguf.md). It is untrusted: every length and count in it is compared with the number
of bytes that remain in the file.

The `gguf` package's own reader creates an array for every element of every list, however many a file claims: a file of 260 bytes
could exhaust the memory, and a real vocabulary takes seconds.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from dtype_engine.core.errors import UserError
from dtype_engine.core.regular_files import open_regular, reading
from dtype_engine.core.text import printable

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_SMALLEST_TENSOR, _SMALLEST_FIELD = 24, 13
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The format of `struct` of each numeric type. The keys are the numbers by which GGUF identifies types."""
_WIDTHS = {kind: struct.calcsize(f"={code}") for kind, code in _FORMATS.items()}
_UINT32, _TEXT, _LIST = 4, 8, 9
_LONGEST_TEXT = 4096
"""The maximum length of a field's text in bytes. Longer texts, such as chat templates, are skipped."""
_MOST_DIMENSIONS = 8
_MOST_TEXTS = 20_000_000
"""The maximum number of strings in all lists of a header. The largest vocabularies have 300,000."""
_DEEPEST = 4
_LONGEST_NAME = 65_535


class ListLength(int):
    """The length of a list that a field holds. The list's values are not kept."""


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """The header of one tensor."""

    name: str
    shape: tuple[int, ...]
    """The shape, with dimensions in torch's order."""
    kind: int
    """The number by which GGUF identifies the type."""
    start: int
    """The offset of the tensor's bytes from the end of the header, `data_start`."""


@dataclass(slots=True)
class GGUFHeader:
    """The content of a GGUF file's header."""

    swapped: bool = False
    """Whether the file's byte order differs from this machine's."""
    alignment: int = 32
    data_start: int = 0
    tensors: list[GGUFTensor] = field(default_factory=list)
    fields: dict[str, int | float | bool | str] = field(default_factory=dict)
    """The header's fields by name, with the `ListLength` instead of a list, and without texts over `_LONGEST_TEXT`."""


def read_gguf_header(path: Path) -> GGUFHeader:
    """Return the content of a GGUF file's header. Raises UserError, which names the file and the problem."""
    with reading(path), open_regular(path) as file:
        return _Reader(path, file).header()


class _Reader:
    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.file = file
        self.size = os.fstat(file.fileno()).st_size
        self.at = 0
        self.where = "its first bytes"
        self.texts = 0
        self.order = "<"

    def header(self) -> GGUFHeader:
        if self.size < 24 or self.take(4) != MAGIC:
            raise UserError(f"{self.path} is no GGUF file: it does not begin with GGUF")
        header = GGUFHeader()
        version = self.number("I")
        if version & 0xFFFF == 0:  # of the other byte order: no version is so large
            self.order, header.swapped = ">", True
            version = int.from_bytes(version.to_bytes(4, "little"), "big")
        if version not in VERSIONS:
            raise UserError(
                f"{self.path} is of GGUF version {version}, and versions {' and '.join(map(str, VERSIONS))} are read"
            )
        tensors, fields = self.number("Q"), self.number("Q")
        if tensors * _SMALLEST_TENSOR + fields * _SMALLEST_FIELD > self.size:
            raise UserError(
                f"{self.path}: the header claims {tensors} tensors and {fields} fields and the file has {self.size} bytes: "
                "it is truncated or damaged"
            )
        names = set[str]()
        for index in range(1, fields + 1):
            self.field(header, names, index)
        header.tensors = [self.tensor(index) for index in range(1, tensors + 1)]
        header.data_start = -(-self.at // header.alignment) * header.alignment
        return header

    def field(self, header: GGUFHeader, names: set[str], index: int) -> None:
        self.where = f"field {index}"
        name = self.name()
        if name in names:
            raise UserError(f"{self.path}: the header has the field {printable(name)!r} twice")
        names.add(name)
        self.where = f"field {printable(name)!r}"
        kind = self.number("I")
        if name != "general.alignment":
            value = self.value(kind)
            if value is not None:
                header.fields[name] = value
            return
        header.alignment = self.number("I") if kind == _UINT32 else 0
        if header.alignment == 0 or header.alignment & (header.alignment - 1):
            raise UserError(f"{self.path}: the field 'general.alignment' must be a power of two: the file is damaged")

    def tensor(self, index: int) -> GGUFTensor:
        self.where = f"tensor {index}"
        name = self.name()
        self.where = f"tensor {printable(name)!r}"
        dimensions = self.number("I")
        if dimensions > _MOST_DIMENSIONS:
            raise UserError(
                f"{self.path}: {self.where} claims {dimensions} dimensions, and {_MOST_DIMENSIONS} are the most: it is damaged"
            )
        *extents, kind, start = struct.unpack(f"{self.order}{dimensions}QIQ", self.take(8 * dimensions + 12))
        return GGUFTensor(name, tuple(reversed(extents)), kind, start)

    def value(self, kind: int) -> int | float | bool | str | None:
        """Return a field's value of the type `kind`: a number or short text, a `ListLength`, or None for a longer text."""
        if kind in _FORMATS:
            number: int | float | bool = self.number(_FORMATS[kind])
            return number
        if kind == _TEXT:
            length = self.number("Q")
            if length <= _LONGEST_TEXT:
                return self.take(length).decode(errors="replace")
            self.skip(length)
            return None
        if kind != _LIST:
            self.skip_value(kind)
            return None
        inner, count = self.number("I"), self.number("Q")
        self.skip_list(inner, count, 0)
        return ListLength(count)

    def skip_value(self, kind: int, depth: int = 0) -> None:
        """Skip a value that is nested in `depth` lists."""
        if kind in _WIDTHS:
            self.skip(_WIDTHS[kind])
            return
        if kind == _TEXT:
            self.skip(self.number("Q"))
            return
        if kind != _LIST:
            raise UserError(
                f"{self.path}: {self.where} is of type {kind}, which GGUF does not have: the file is damaged"
            )
        self.skip_list(self.number("I"), self.number("Q"), depth)

    def skip_list(self, inner: int, count: int, depth: int) -> None:
        """Skip `count` values whose type has the number `inner`, in a list that is nested in `depth` others."""
        if inner in _WIDTHS:
            self.skip(_WIDTHS[inner] * count)
            return
        if depth >= _DEEPEST:
            raise UserError(f"{self.path}: {self.where} has lists in lists {_DEEPEST} deep: the file is damaged")
        self.need((8 if inner == _TEXT else 12) * count)
        self.texts += count
        if self.texts > _MOST_TEXTS:
            raise UserError(f"{self.path}: the header has over {_MOST_TEXTS:,} texts, which are too many")
        if inner == _TEXT:
            self.skip_texts(count)
            return
        for _ in range(count):
            self.skip_value(inner, depth + 1)

    def skip_texts(self, count: int) -> None:
        """Skip strings, such as a vocabulary. The loop must be fast, because they are the largest part of a header."""
        read, unpack = self.file.read, struct.Struct(f"{self.order}Q").unpack
        at, size = self.at, self.size
        for _ in range(count):
            raw = read(8)
            length = unpack(raw)[0] if len(raw) == 8 else size
            at += 8 + length
            if at > size:
                raise self.ended(length)
            if length < _LONGEST_NAME:
                read(length)
            else:
                self.file.seek(length, os.SEEK_CUR)
        self.at = at

    def number(self, kind: str) -> Any:
        return struct.unpack(f"{self.order}{kind}", self.take(struct.calcsize(f"={kind}")))[0]

    def name(self) -> str:
        length = self.number("Q")
        if length > _LONGEST_NAME:
            self.need(length)
            raise UserError(f"{self.path}: {self.where} has a name of {length} bytes: the file is damaged")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise UserError(f"{self.path}: {self.where} has a name that is not UTF-8: the file is damaged") from None

    def take(self, count: int) -> bytes:
        self.need(count)
        content = self.file.read(count)
        if len(content) < count:
            raise self.ended(count)  # cut while it is read
        self.at += count
        return content

    def skip(self, count: int) -> None:
        self.need(count)
        self.file.seek(count, os.SEEK_CUR)
        self.at += count

    def need(self, count: int) -> None:
        if count > self.size - self.at:
            raise self.ended(count)

    def ended(self, count: int) -> UserError:
        return UserError(
            f"{self.path}: {self.where} claims {count} bytes and the file has {self.size}: it is truncated or damaged"
        )
