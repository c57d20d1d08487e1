"""Checks the zip archive that `torch.save` writes, before torch reads it (torch/serialization.py defines the format).

`data.pkl` names the tensors and the storages that they view. Each storage is a record `data/KEY` of raw bytes. torch maps the file
and reads as many bytes as the pickle claims, without checking whether the record is compressed or long enough.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

from dtype_engine.checkpoint.pickle_size import TooManyOpcodes, some_opcodes
from dtype_engine.core.errors import UserError, exhausted, one_line
from dtype_engine.core.text import printable
from dtype_engine.core.units import human_bytes

_LARGEST_PICKLE = 100_000_000
"""The most bytes of an inflated `data.pkl`, which is also the limit of a safetensors header."""
_MOST_DEFLATED = 1032
"""The maximum compression ratio of deflate, according to zlib. Only very short records may exceed it slightly."""
_LOCAL = struct.Struct("<4s22xHH")
"""The header in front of a record of a zip archive: its signature, and the lengths of the name and of the extra data after it."""
_STORAGES = {
    "UntypedStorage": 1, "ByteStorage": 1, "CharStorage": 1, "BoolStorage": 1, "QInt8Storage": 1, "QUInt8Storage": 1,
    "QUInt4x2Storage": 1, "QUInt2x4Storage": 1, "ShortStorage": 2, "HalfStorage": 2, "BFloat16Storage": 2, "IntStorage": 4,
    "FloatStorage": 4, "QInt32Storage": 4, "LongStorage": 8, "DoubleStorage": 8, "ComplexFloatStorage": 8,
    "ComplexDoubleStorage": 16,
}  # fmt: skip
"""Bytes per element of torch's storage classes."""


def check_archive(path: Path, trust: bool) -> tuple[bool, bool]:
    """Return (whether a zip archive has compressed records, so that it can't be mapped; whether it has TorchScript code). trust:
    whether to accept pickles that torch.save would not write.

    Raises UserError if a record is missing, shorter than the storage that the pickle declares, present twice, compressed in a way
    that torch can't read, or inflates to more than the free memory.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
            by_name = _checked_records(path, records)
            _check_overlaps(path, records)
            scripted = any(name.endswith("/constants.pkl") for name in by_name)
            compressed = any(record.compress_type != zipfile.ZIP_STORED for record in records)
            root = records[0].filename.partition("/")[0] if records else ""
            pickled = by_name.get(f"{root}/data.pkl")
            if pickled is not None and not scripted:
                if pickled.compress_type != zipfile.ZIP_STORED and pickled.file_size > _LARGEST_PICKLE:
                    raise UserError(
                        f"{path}: its data.pkl inflates to {human_bytes(pickled.file_size)}, over the limit of "
                        f"{human_bytes(_LARGEST_PICKLE)} for the names of tensors"
                    )
                claims = _claims(path, archive.read(pickled), trust)
                for key, size in claims.items():
                    _check_claim(path, key, size, by_name.get(f"{root}/data/{key}"))
    except (OSError, EOFError, RuntimeError, NotImplementedError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        reason = exhausted(error) or getattr(error, "strerror", None) or one_line(error)
        raise UserError(f"can't read {path}: {reason}") from None
    return compressed, scripted


def refuse_too_large(path: Path) -> None:
    """Raise UserError if a file is a zip archive whose records do not fit into memory. Also raises OSError and zipfile's errors."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            _checked_records(path, archive.infolist())


def refuse_cut_zip(path: Path) -> None:
    """Raise UserError if a file begins as a zip archive but lacks the directory at its end, and OSError if it can't be read."""
    with open(path, "rb") as file:
        begins = file.read(4) == b"PK\x03\x04"
    if begins and not zipfile.is_zipfile(path):
        raise UserError(
            f"{path} is cut short: it begins as a zip archive and has no end of one; copy or download it again"
        )


def is_compressed(path: Path) -> bool:
    """Return whether a file is a zip archive with compressed records, whose bytes are not the values of weights."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(record.compress_type != zipfile.ZIP_STORED for record in archive.infolist())


def _checked_records(path: Path, records: list[zipfile.ZipInfo]) -> dict[str, zipfile.ZipInfo]:
    by_name: dict[str, zipfile.ZipInfo] = {}
    inflated = 0
    for record in records:
        name = printable(record.filename)
        if record.filename in by_name:
            raise UserError(f"{path}: the archive holds {name} twice, so it is not clear which one is meant")
        by_name[record.filename] = record
        if record.flag_bits & 1:
            raise UserError(f"{path}: {name} in the archive is encrypted, which can't be read")
        if record.compress_type == zipfile.ZIP_STORED:
            whole = record.compress_size == record.file_size
        elif record.compress_type == zipfile.ZIP_DEFLATED:
            whole = record.file_size <= _MOST_DEFLATED * (record.compress_size + 64)
            inflated += record.file_size
        else:
            raise UserError(f"{path}: {name} in the archive is compressed in a way that PyTorch can't read")
        if not whole:
            raise UserError(
                f"{path}: {name} claims {record.file_size} bytes and takes {record.compress_size} in the archive: it is damaged"
            )
    if inflated:
        from dtype_engine.core.system_memory import free_memory  # rarely needed

        free = free_memory()
        if inflated > free:
            raise UserError(
                f"{path} is compressed and inflates to {human_bytes(inflated)}, and {human_bytes(free)} of memory are free; save "
                "it again without compression, so that it can be mapped"
            )
    return by_name


def _check_overlaps(path: Path, records: list[zipfile.ZipInfo]) -> None:
    """Raise UserError if the bytes of two records overlap. Only the header in front of a record tells where its bytes begin."""
    end, before = 0, ""
    with open(path, "rb") as file:
        for record in sorted(records, key=lambda record: record.header_offset):
            file.seek(record.header_offset)
            local = file.read(_LOCAL.size)
            signature, name, extra = _LOCAL.unpack(local) if len(local) == _LOCAL.size else (b"", 0, 0)
            if signature != b"PK\x03\x04":
                raise UserError(f"{path}: {printable(record.filename)} is not where the archive says: it is damaged")
            if record.header_offset < end:
                raise UserError(
                    f"{path}: {printable(record.filename)} lies over {before} in the archive: it is damaged"
                )
            end = record.header_offset + _LOCAL.size + name + extra + record.compress_size
            before = printable(record.filename)
        file.seek(0, 2)
        if end > file.tell():
            raise UserError(f"{path}: {before} ends after the archive does: it is truncated or damaged")


def _check_claim(path: Path, key: str, size: int, record: zipfile.ZipInfo | None) -> None:
    if record is None:
        raise UserError(f"{path}: storage {printable(key)} of its tensors is not in the archive: the file is damaged")
    if size > record.file_size:
        raise UserError(
            f"{path}: storage {printable(key)} should have {size} bytes and has {record.file_size}: the file is damaged"
        )


def _claims(path: Path, pickled: bytes, trust: bool) -> dict[str, int]:
    try:
        return storage_claims(pickled)
    except TooManyOpcodes as error:
        raise UserError(f"{path}: {error}") from None
    except Exception as error:  # a pickle is a program; a damaged one can fail in any way
        if trust:
            return {}
        reason = one_line(error, 100)
        raise UserError(
            f"{path} is no PyTorch file, or it is damaged: its data.pkl can't be followed ({reason})"
        ) from None


class _Global(str):
    __slots__ = ()


_PLACEHOLDER = object()
"""Represents, on the simulated stack, any object that is not a string, number, tuple or class name."""


def storage_claims(pickled: bytes) -> dict[str, int]:
    """Return the size in bytes that a pickle of torch declares for each storage, by the storage's key.

    Of the pickle's opcodes, only the effects on strings, numbers and names of classes are simulated: nothing is imported, called or
    created. Raises ValueError for a storage reference that torch would not write, and pickletools' errors for a damaged pickle.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    claims: dict[str, int] = {}
    argument: Any
    for opcode, argument, _ in some_opcodes(pickled):
        name = opcode.name
        if name == "MARK":
            marks.append(len(stack))
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[int(argument)])
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[int(argument)] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name == "DUP":
            stack.append(stack[-1])
        elif name == "POP" and marks and marks[-1] == len(stack):
            marks.pop()
        elif name in ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"):
            start = marks.pop() if name == "TUPLE" else len(stack) - int(name[-1])
            parts = tuple(stack[start:])
            plain = len(parts) == 5 and all(isinstance(part, (str, int)) for part in parts)
            stack[start:] = [parts if plain else _PLACEHOLDER]
        elif name == "GLOBAL":
            stack.append(_Global(argument))
        elif name == "STACK_GLOBAL":
            module, attribute = stack[-2:]
            stack[-2:] = [_Global(f"{module} {attribute}")]
        elif name == "BINPERSID":
            key, size = _storage(stack.pop())
            claims[key] = max(size, claims.get(key, 0))
            stack.append(_PLACEHOLDER)
        elif name == "PERSID":
            raise ValueError("a storage is named in the way of old pickles")
        elif not opcode.stack_before and len(opcode.stack_after) == 1 and isinstance(argument, (str, int)):
            stack.append(argument)
        else:
            _step(opcode, stack, marks)
    return claims


def _step(opcode: Any, stack: list[Any], marks: list[int]) -> None:
    """Apply the stack effect of an opcode that does not concern storages, with placeholders as results. marks: stack heights at
    MARKs.
    """
    before = [kind.name for kind in opcode.stack_before]
    if "mark" in before:
        del stack[marks.pop() :]
        before = before[: before.index("mark")]
    if len(before) > len(stack):
        raise ValueError("it takes more than there is")
    del stack[len(stack) - len(before) :]
    stack += [_PLACEHOLDER] * len(opcode.stack_after)


def _storage(reference: Any) -> tuple[str, int]:
    if not isinstance(reference, tuple):
        raise ValueError("a storage is not named as torch does it")
    kind, made, key, _, elements = reference
    width = _STORAGES.get(made.rpartition(" ")[2].rpartition(".")[2]) if isinstance(made, _Global) else None
    if kind != "storage" or width is None or not isinstance(key, str) or type(elements) is not int or elements < 0:
        raise ValueError("a storage is not named as torch does it")
    return key, elements * width
