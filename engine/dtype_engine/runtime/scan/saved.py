"""Reads and writes saved scans: JSON files with the results of a scan and a hash of its model, inputs and settings.

The file of an estimated scan has an entry with results for each finished sequence (`sequences`). The file of an exact scan has the
result of each measurement (`scores`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from dtype_engine.checkpoint import ByteRange, CheckpointTensor, FileIdentity
from dtype_engine.core.atomic_write import write_text_atomic
from dtype_engine.core.errors import UserError
from dtype_engine.core.number_ranges import Amount, Count
from dtype_engine.core.options import STORED, RunSettings
from dtype_engine.core.regular_files import read_regular, reading
from dtype_engine.core.shard import WHOLE, Shard
from dtype_engine.core.text import printable
from dtype_engine.core.typed_data import as_plain, as_type
from dtype_engine.results.scan import MOST_DRAWS
from dtype_engine.runtime.inputs import Inputs
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.scan.routing import Key, TopKSample
from dtype_engine.runtime.scan.scanned_roundings import RoundingGain, RoundingGains
from dtype_engine.runtime.scan.scores import SequenceScores
from dtype_engine.runtime.weights.blockwise import BlockwiseSource
from dtype_engine.runtime.weights.files import read_range

_VERSION = 4
_SAMPLED = 1024
_LARGEST = 4 << 30


@dataclass(frozen=True)
class Fingerprint:
    """Identifies the model, inputs, dtypes and settings of a scan. `model` and `inputs` are hashes."""

    model: str
    inputs: str
    dtypes: tuple[str, ...]
    settings: str
    calibration: str = ""
    """A hash of the inputs to which weights are rounded, or "" if no dtype has a rounding."""

    @classmethod
    def of(
        cls,
        model: LiveModel,
        inputs: Inputs,
        dtypes: Sequence[str],
        settings: RunSettings,
        calibration: Inputs | None = None,
    ) -> Fingerprint:
        """Compute the hashes of a scan to `dtypes`. They cover all inputs, and name, shape and some values of each weight.
        calibration: the inputs to which weights are rounded, if a dtype has a rounding.
        """
        calibrated = "" if calibration is None else hash_of(calibration)
        return cls(hash_of_model(model, _SAMPLED), hash_of(inputs), tuple(dtypes), str(settings), calibrated)


def hash_of_model(model: LiveModel, most: int | None = None) -> str:
    """Return a hash of a model's weights as stored, and of what decides its reference. It covers name, shape and dtype of each
    weight, and about `most` of the elements of each of its tensors, by default all. Of a weight that stays on the disk, it covers
    the first bytes.
    """
    weights = hashlib.sha256()
    if model.reference == STORED:
        weights.update(STORED.encode())
    for each in model.side_settings:
        weights.update(f"{each.module} {each.reference} {each.candidate}\n".encode())
    for name, weight in model.weights.items():
        weights.update(f"{name} {weight.info.shape} {weight.info.dtype}\n".encode())
        for values in (weight.stored, weight.other_reference):
            for stored in values.in_files if isinstance(values, BlockwiseSource) else ():
                _digest(_first_bytes(stored), weights)  # every n-th value, as below, would read most of the file
            for tensor in () if values is None or isinstance(values, BlockwiseSource) else values.tensors:
                for flat in map(torch.flatten, _dense_parts(tensor)):
                    _digest(flat[:: max(1, flat.numel() // (most or flat.numel() or 1))], weights)
    return weights.hexdigest()


def _dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the indices and values of a sparse tensor, or any other tensor itself."""
    if tensor.layout is torch.strided:
        return (tensor,)
    entries = tensor.to_sparse().coalesce()
    return entries.indices(), entries.values()


def hash_of(inputs: Inputs) -> str:
    """Return a hash of all arguments of all batches."""
    calls = hashlib.sha256()
    for batch in inputs.batches:
        _digest((batch.args, batch.kwargs), calls)
    return calls.hexdigest()


def _first_bytes(tensor: CheckpointTensor) -> torch.Tensor:
    if tensor.start is None:
        return torch.empty(0)
    whole = ByteRange(tensor.file, tensor.start, tensor.nbytes)
    return read_range(whole, torch.uint8, 0, min(_SAMPLED, tensor.nbytes))


def _digest(value: Any, into: Any) -> None:
    if isinstance(value, torch.Tensor):
        into.update(f"{value.dtype} {tuple(value.shape)}".encode())
        into.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            into.update(str(key).encode())
            _digest(value[key], into)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _digest(item, into)
    else:
        into.update(repr(value).encode())


@dataclass(frozen=True)
class SavedScan:
    """The content of a saved scan: its results, and the model, inputs, dtypes and settings for which the results are valid."""

    fingerprint: Fingerprint
    draws: int
    unit: str
    forward_seconds: float
    scan_seconds: float
    parts: int
    """The size of the whole scan: the number of sequences of an estimated scan, or of measurements of an exact scan."""
    done: dict[int, SequenceScores]
    """The results of an estimated scan, by the index of the sequence."""
    measured: dict[Key, tuple[float, float | None]] | None = None
    """The results of an exact scan: (drift, its standard error) by (weight, dtype). None for an estimated scan."""
    shard: Shard = WHOLE
    """The share of the whole scan that was assigned to the process which last saved the file."""
    roundings: RoundingGains = field(default_factory=dict)
    """What the roundings did to weights, by (weight, dtype)."""

    @property
    def count(self) -> int:
        """The number of finished parts."""
        return len(self.done) if self.measured is None else len(self.measured)


class _TopKSample(msgspec.Struct):
    """The saved form of a `TopKSample`."""

    place: Count
    share: Amount
    margins: list[float]
    cost: float
    sums: list[tuple[str, str, Amount | None, float]]
    """Rows of (weight, dtype, squares, independent)."""


class _Sequence(msgspec.Struct):
    """The saved form of a `SequenceScores`."""

    mass: Amount
    """The value of `SequenceScores.normalizer`."""
    complete: bool
    sums: list[tuple[str, str, float | None, float | None, float | None]]
    """Rows of (weight, dtype, sums, independent, measured)."""
    selections: list[_TopKSample]
    index: Count


class ScanFile(msgspec.Struct):
    """The content of a file of a saved scan, except its version."""

    fingerprint: Fingerprint
    draws: Count
    unit: str
    forward_seconds: Amount
    scan_seconds: Amount
    sequences: list[_Sequence]
    parts: Count
    scores: list[tuple[str, str, float, float | None]] | None = None
    shard: Shard = WHOLE
    roundings: list[tuple[str, str, Amount | None, Count]] = []
    """Rows of (weight, dtype, gain, unseen), of the fields of `RoundingGain`."""


def _shared(scan: SavedScan | ScanFile) -> dict[str, Any]:
    """Return the fields that are the same in a scan and in its file."""
    names = ("fingerprint", "draws", "unit", "forward_seconds", "scan_seconds", "parts", "shard")
    return {name: getattr(scan, name) for name in names}


def write(path: Path, saved: SavedScan) -> None:
    """Save a scan atomically. Raises UserError if the file can't be written."""
    sequences = []
    for index, one in sorted(saved.done.items()):
        samples = [
            _TopKSample(each.index, each.share, each.margins, each.cost, _rows(each.squares, each.independent))
            for each in one.topk_samples
        ]
        rows = _rows(one.sums, one.independent, one.measured)
        sequences.append(_Sequence(one.normalizer, one.complete, rows, samples, index))
    scores = None if saved.measured is None else [(*key, *value) for key, value in sorted(saved.measured.items())]
    rounded = [(*key, each.gain, each.unseen) for key, each in sorted(saved.roundings.items())]
    file = ScanFile(**_shared(saved), sequences=sequences, scores=scores, roundings=rounded)
    # The json module is used because msgspec's JSON can't represent infinity.
    write_text_atomic(path, json.dumps({"version": _VERSION} | as_plain(file)), replace=True)


def write_joined(path: Path, saved: SavedScan, seen: FileIdentity | None) -> FileIdentity:
    """Save a scan, and keep the results that other processes have saved in the same file. Returns the new file's identity.

    seen: the file's identity after this process last wrote it. If two processes write at the same moment, the results of one are
    missing in the file until it saves again. Raises UserError if the file can't be written, or now holds a different scan.
    """
    if path.exists() and (seen is None or seen.change() is not None):
        other = read(path, saved.fingerprint, saved.draws, saved.measured is not None)
        measured = None if saved.measured is None else (other.measured or {}) | saved.measured
        roundings = {**other.roundings, **saved.roundings}
        saved = dataclasses.replace(saved, done=other.done | saved.done, measured=measured, roundings=roundings)
    write(path, saved)
    return FileIdentity.of(path)


def read(path: Path, expected: Fingerprint, draws: int | None, exact: bool = False) -> SavedScan:
    """Read a saved scan. Raises UserError if its model, inputs, dtypes, settings or method (`exact`) differ from those expected,
    or if it has another number of backward passes than `draws`.
    """
    saved = read_any(path)
    differing = different(saved.fingerprint, expected)
    if draws is not None and saved.draws != draws:
        differing.append("number of draws")
    if (saved.measured is not None) != exact:
        differing = ["method (estimated)" if exact else "method (--exact)"]
    if differing:
        raise UserError(
            f"the saved scan {path} was made with another {' and '.join(differing)}; remove it or give another file"
        )
    return saved


def different(one: Fingerprint, other: Fingerprint) -> list[str]:
    """Return the names of the fields, such as "inputs", in which two fingerprints differ."""
    return [key for key, value in vars(other).items() if getattr(one, key) != value]


def read_any(path: Path) -> SavedScan:
    """Read a saved scan, whatever its model. Raises UserError if the file is not a valid saved scan."""
    try:
        with reading(f"the saved scan {path}"):
            data = json.loads(read_regular(path, _LARGEST))
            version = data["version"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{path} is not a saved scan; remove it or give another file") from None
    if version != _VERSION:
        raise UserError(
            f"{path}: saved scan version {printable(repr(version), 60)} is unknown; this program reads version {_VERSION}"
        )
    try:
        file = as_type(data, ScanFile)
    except UserError as error:
        raise UserError(f"{path} is not a saved scan ({error}); remove it or give another file") from None
    if any(number is not None and math.isnan(number) for number in _drifts(file)):
        raise UserError(f"{path} is not a saved scan (a score is NaN); remove it or give another file")
    done = {sequence.index: _scores(sequence) for sequence in file.sequences}
    measured = (
        None if file.scores is None else {(name, dtype): (score, error) for name, dtype, score, error in file.scores}
    )
    wrong = next((what for what, fits in _rules(file) if not fits), None)
    if wrong is not None:
        raise UserError(f"{path} is not a saved scan ({wrong}); remove it or give another file")
    roundings = {(name, dtype): RoundingGain(gain, unseen) for name, dtype, gain, unseen in file.roundings}
    return SavedScan(**_shared(file), done=done, measured=measured, roundings=roundings)


def _rules(file: ScanFile) -> Iterator[tuple[str, bool]]:
    """Yield (entry, whether it fits the other entries) for entries whose types do not say what they may be."""
    indexes = {sequence.index for sequence in file.sequences}
    fits = len(indexes) == len(file.sequences) and max(indexes, default=-1) < file.parts
    yield "sequences: their indexes", fits
    yield f"draws: {file.draws}", file.scores is not None or 1 <= file.draws <= MOST_DRAWS
    yield f"shard: {file.shard}", file.shard.number <= file.shard.count
    yield f"parts: {file.parts}", len(file.scores or ()) <= file.parts


def _drifts(file: ScanFile) -> Iterator[float | None]:
    """Yield the numbers that must not be NaN, although they may be negative: the drifts."""
    yield from (score for _, _, score, _ in file.scores or ())
    for sequence in file.sequences:
        for _, _, drift, _, measured in sequence.sums:
            yield from (drift, measured)
        for sample in sequence.selections:
            yield from (sample.cost, *(squares for _, _, squares, _ in sample.sums))


def _rows(*columns: Mapping[Key, float]) -> list[Any]:
    """Combine mappings by (weight, dtype) into rows of (weight, dtype, the value in each mapping or None)."""
    keys = sorted(set().union(*columns))
    return [(*key, *(column.get(key) for column in columns)) for key in keys]


def _column(rows: Sequence[tuple[Any, ...]], number: int) -> dict[Key, float]:
    """Return column `number` of rows (weight, dtype, column 0, column 1, ...) as a mapping by (weight, dtype), without None."""
    return {(row[0], row[1]): row[2 + number] for row in rows if row[2 + number] is not None}


def _scores(sequence: _Sequence) -> SequenceScores:
    samples = [
        TopKSample(each.place, each.share, each.margins, each.cost, _column(each.sums, 0), _column(each.sums, 1))
        for each in sequence.selections
    ]
    sums, independent, measured = (_column(sequence.sums, number) for number in range(3))
    return SequenceScores(sequence.mass, sums, independent, sequence.complete, samples, measured)
