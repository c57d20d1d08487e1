"""Saved scans: what every sequence gave, with a fingerprint of what it was made of, as JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dtype_engine.core.atomic_write import write_text_atomic
from dtype_engine.core.errors import UserError
from dtype_engine.core.options import RunSettings
from dtype_engine.core.regular_files import read_regular
from dtype_engine.core.text import printable
from dtype_engine.runtime.inputs import Inputs
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.scan.routing import Key, SelectionSample
from dtype_engine.runtime.scan.scores import SequenceScores

_VERSION = 2
_SAMPLED = 1024
_LARGEST = 4 << 30


@dataclass(frozen=True)
class Fingerprint:
    """What a saved scan was made of."""

    model: str
    inputs: str
    dtypes: tuple[str, ...]
    settings: str

    @classmethod
    def of(cls, model: LiveModel, inputs: Inputs, asked: Sequence[str], settings: RunSettings) -> Fingerprint:
        """Names, shapes and a sample of the values of every weight; every input."""
        weights, calls = hashlib.sha256(), hashlib.sha256()
        for name, weight in model.weights.items():
            weights.update(f"{name} {weight.info.shape} {weight.info.dtype}\n".encode())
            flat = weight.original.reshape(-1)
            _digest(flat[:: max(1, flat.numel() // _SAMPLED)], weights)
        for batch in inputs.batches:
            _digest((batch.args, batch.kwargs), calls)
        return cls(weights.hexdigest(), calls.hexdigest(), tuple(asked), str(settings))


def _digest(value: Any, into: Any) -> None:
    """Add a value, and the tensors in it, to a hash."""
    if isinstance(value, torch.Tensor):
        into.update(f"{value.dtype} {tuple(value.shape)}".encode())
        into.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
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
class Saved:
    """What is in the file."""

    fingerprint: Fingerprint
    draws: int
    unit: str
    forward_seconds: float
    scan_seconds: float
    done: list[SequenceScores]


def write(path: Path, saved: Saved) -> None:
    """Save a scan, whole or not at all. Raises UserError."""
    sequences = [
        {
            "mass": one.mass,
            "complete": one.complete,
            "sums": _rows(one.sums, one.independent, one.errors, one.measured),
            "selections": [
                {
                    "place": sample.place,
                    "share": sample.share,
                    "margins": sample.margins,
                    "cost": sample.cost,
                    "sums": _rows(sample.squares, sample.independent),
                }
                for sample in one.selections
            ],
        }
        for one in saved.done
    ]
    data = {"version": _VERSION} | {key: value for key, value in vars(saved).items() if key != "done"}
    data |= {"fingerprint": asdict(saved.fingerprint), "sequences": sequences}
    write_text_atomic(path, json.dumps(data), replace=True)


def read(path: Path, expected: Fingerprint, draws: int | None) -> Saved:
    """What a saved scan has. Raises UserError when it is of another model, other inputs, dtypes or `draws`."""
    try:
        data = json.loads(read_regular(path, _LARGEST))
        version = data["version"]
        if version != _VERSION:
            raise UserError(
                f"{path}: saved scan version {printable(repr(version), 60)} is unknown; this program reads version {_VERSION}"
            )
        saved = Saved(
            Fingerprint(**(data["fingerprint"] | {"dtypes": tuple(data["fingerprint"]["dtypes"])})),
            int(data["draws"]),
            str(data["unit"]),
            float(data["forward_seconds"]),
            float(data["scan_seconds"]),
            [_sequence(entry) for entry in data["sequences"]],
        )
    except OSError as error:
        raise UserError(f"can't read the saved scan {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise UserError(f"{path} is not a saved scan; remove it or give another file") from None
    differing = [key for key, value in asdict(expected).items() if getattr(saved.fingerprint, key) != value]
    if draws is not None and saved.draws != draws:
        differing.append("number of draws")
    if differing:
        raise UserError(
            f"the saved scan {path} was made with another {' and '.join(differing)}; remove it or give another file"
        )
    return saved


def _rows(*columns: Mapping[Key, float]) -> list[list[Any]]:
    """[name, dtype, a figure of each column or null]."""
    keys = sorted(set().union(*columns))
    return [[*key, *(column.get(key) for column in columns)] for key in keys]


def _columns(rows: Any, count: int) -> list[dict[Key, float]]:
    columns: list[dict[Key, float]] = [{} for _ in range(count)]
    for name, dtype, *figures in rows:
        for column, figure in zip(columns, figures, strict=True):
            if figure is not None:
                column[str(name), str(dtype)] = float(figure)
    return columns


def _sequence(entry: Any) -> SequenceScores:
    samples = []
    for each in entry["selections"]:
        squares, independent = _columns(each["sums"], 2)
        margins = [float(margin) for margin in each["margins"]]
        samples.append(
            SelectionSample(
                int(each["place"]), float(each["share"]), margins, float(each["cost"]), squares, independent
            )
        )
    sums, independent, errors, measured = _columns(entry["sums"], 4)
    return SequenceScores(float(entry["mass"]), sums, independent, errors, bool(entry["complete"]), samples, measured)
