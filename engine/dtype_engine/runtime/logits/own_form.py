"""Reads and writes outputs as safetensors: `input_ids.N` int64 [positions] and `logits.N` [positions, classes] of sequence N, from
0. Other programs may also write all sequences of equal length at once: `input_ids` [sequences, positions] and `logits`
[sequences, positions, classes]. In place of logits there may be natural logarithms of probabilities, `log_probs`.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from dtype_engine.checkpoint import CheckpointTensor
from dtype_engine.checkpoint.safetensors_header import read_header
from dtype_engine.core.atomic_write import check_target, write_atomic
from dtype_engine.core.errors import UserError
from dtype_engine.core.input_limits import InputLimits
from dtype_engine.core.text import printable
from dtype_engine.core.units import human_bytes
from dtype_engine.runtime.formats.dequantize import dtype_name, torch_dtype
from dtype_engine.runtime.logits.outputs import LogitsFile, Outputs
from dtype_engine.runtime.weights.files import read_range

_IDS = "input_ids"
_KINDS = ("logits", "log_probs")
_FLOATS = ("float16", "bfloat16", "float32")
_NUMBERED = re.compile(rf"{_IDS}\.([0-9]{{1,9}})")


class _OwnFile(LogitsFile):
    def __init__(self, path: Path, kind: str, tokens: list[torch.Tensor], values: list[CheckpointTensor]) -> None:
        super().__init__(path, "safetensors", tokens, values[0].shape[-1], are_logits=kind == "logits")
        self._values = values

    def _read(self, number: int) -> Outputs:
        return Outputs(0, _copied(self._values[number]))


def read_own(path: Path, limits: InputLimits, bos: frozenset[int]) -> LogitsFile:
    """Read the header and the tokens. Raises UserError for a file of another form, and for more tokens than the limit."""
    tensors, _ = read_header(path)
    kinds = [kind for kind in _KINDS if any(name.split(".")[0] == kind for name in tensors)]
    if len(kinds) != 1:
        raise UserError(f"{path}: a file of outputs has either logits or log_probs, and input_ids")
    pairs = _pairs(path, tensors, kinds[0])
    for ids, values in pairs:
        named = f"{path}: {printable(values.name, 100)}"
        if ids.dtype not in ("int64", "int32") or values.dtype not in _FLOATS:
            raise UserError(f"{named} is {values.dtype} and its ids {ids.dtype}: give {', '.join(_FLOATS)} and int64")
        if len(ids.shape) != 1 or len(values.shape) != 2 or ids.shape[0] != values.shape[0]:
            raise UserError(f"{named} is {list(values.shape)} for {list(ids.shape)} ids: give [positions, classes]")
        if values.shape[1] != pairs[0][1].shape[1]:
            raise UserError(f"{named} has {values.shape[1]} classes, and the first sequence {pairs[0][1].shape[1]}")
    limits.refuse_file("tokens", str(path), sum(ids.shape[0] for ids, _ in pairs))
    return _OwnFile(path, kinds[0], [_copied(ids).long() for ids, _ in pairs], [values for _, values in pairs])


def _pairs(
    path: Path, tensors: dict[str, CheckpointTensor], kind: str
) -> list[tuple[CheckpointTensor, CheckpointTensor]]:
    """Return (token ids, values) of each sequence. Raises UserError if there are none, or if one of the two is missing."""
    if _IDS in tensors and kind in tensors:
        ids, values = tensors[_IDS], tensors[kind]
        if len(ids.shape) != 2 or len(values.shape) != 3 or ids.shape != values.shape[:2] or not math.prod(ids.shape):
            raise UserError(
                f"{path}: {_IDS} is {list(ids.shape)} and {kind} is {list(values.shape)}: give [sequences, positions] and "
                "[sequences, positions, classes]"
            )
        return [(ids.at(number), values.at(number)) for number in range(ids.shape[0])]
    numbers = sorted((match[1] for match in map(_NUMBERED.fullmatch, tensors) if match is not None), key=int)
    missing = next((number for number in numbers if f"{kind}.{number}" not in tensors), None)
    if missing is not None:
        raise UserError(f"{path} has {_IDS}.{missing} and no {kind}.{missing}")
    if not numbers:
        raise UserError(f"{path} has {kind} and no {_IDS}: nothing says on which tokens to run the model")
    return [(tensors[f"{_IDS}.{number}"], tensors[f"{kind}.{number}"]) for number in numbers]


def _copied(stored: CheckpointTensor) -> torch.Tensor:
    place = stored.bytes
    assert place is not None  # a safetensors file has the bytes of each tensor in one piece
    return read_range(place, torch_dtype(stored.dtype), 0, math.prod(stored.shape)).view(stored.shape)


def write_own(
    path: Path, replace: bool, title: str, tokens: Sequence[torch.Tensor], logits: Iterable[torch.Tensor]
) -> Path:
    """Write a file of outputs, one sequence at a time. Returns its absolute path.

    replace: whether to replace a file that exists. title: the model's name, for the file's metadata. tokens: int64 [positions] of
    each sequence. logits: [positions, classes] of each sequence, all of one dtype, which the file has, too; float64 becomes
    float32. Raises UserError if the file can't be written or does not fit on the disk; nothing is then written.
    """
    from dtype_engine.runtime.export.contents import TensorEntry  # what only reads such files does without all of it
    from dtype_engine.runtime.export.write import header

    path = check_target(path, replace)
    source = iter(logits)
    first = _stored(next(source))
    dtype, classes = dtype_name(first.dtype), first.shape[1]
    digits = len(str(len(tokens) - 1))  # with zeros before the number, the header's order is that of the numbers
    entries = [TensorEntry(f"{_IDS}.{number:0{digits}}", "int64", (len(ids),)) for number, ids in enumerate(tokens)]
    entries += [
        TensorEntry(f"logits.{number:0{digits}}", dtype, (len(ids), classes)) for number, ids in enumerate(tokens)
    ]
    needed, free = sum(entry.nbytes for entry in entries), shutil.disk_usage(path.parent).free
    if needed > free:
        raise UserError(
            f"{path} would have {human_bytes(needed)}, {sum(map(len, tokens)):,} tokens with {classes:,} logits each, and "
            f"{human_bytes(free)} are free there; give fewer inputs (--sequences)"
        )
    head, _ = header(entries, {"format": "pt", "model": title})

    def pieces() -> Iterator[bytes]:
        yield head
        yield from map(_bytes, tokens)
        yield _bytes(first)
        yield from (_bytes(_stored(each)) for each in source)

    return write_atomic(path, pieces(), replace)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def _stored(logits: torch.Tensor) -> torch.Tensor:
    return logits.detach().to("cpu", torch.float32 if logits.dtype == torch.float64 else None).contiguous()
