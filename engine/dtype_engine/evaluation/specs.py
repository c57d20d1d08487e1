"""An evaluation as plain data: which model, on which inputs, and what of it. It can be sent anywhere.

Everything here is frozen and made of texts, numbers and paths, so it can be pickled, compared and kept.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtype_engine.core.options import Options, RunSettings
from dtype_engine.results.drift import DriftReport

if TYPE_CHECKING:
    from dtype_engine.checkpoint.source import Source
    from dtype_engine.runtime.scan.exact import MeasuredWeight
    from dtype_engine.runtime.scan.scan import ScannedSequence


@dataclass(frozen=True, slots=True)
class Opened:
    """A model and its inputs, as whoever evaluates has to open them.

    model: as `locate` takes it, a path absolute; None for the demo. weights, inputs: fingerprints of what was opened here.
    """

    model: str | None
    options: Options
    weights: str
    inputs: str


@dataclass(frozen=True, slots=True)
class ScanSequence:
    """One sequence of a scan in some dtypes, with so many backward passes."""

    dtypes: tuple[str, ...]
    draws: int
    index: int


@dataclass(frozen=True, slots=True)
class ExactScore:
    """One weight in one dtype, measured with everything else as in the reference; `dtypes` are those of the scan."""

    dtypes: tuple[str, ...]
    weight: str
    dtype: str


@dataclass(frozen=True, slots=True)
class RecipeDrift:
    """The drift of a recipe: rules as `PATTERN=DTYPE`."""

    rules: tuple[str, ...]
    settings: RunSettings


Task = ScanSequence | ExactScore | RecipeDrift


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What is to be evaluated."""

    opened: Opened
    task: Task


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What came of it: where (host and process), with which versions, and in how many seconds it was made."""

    opened: Opened
    value: ScannedSequence | MeasuredWeight | DriftReport
    host: str
    process: int
    seconds: float
    versions: dict[str, str] = field(default_factory=dict)


def model_text(source: Source, typed: str | None) -> str | None:
    """MODEL so that it means the same in any folder: paths absolute, anything else as typed."""
    if source.path is None or typed is None:
        return typed
    if source.kind == "python":
        return f"{source.path.absolute()}:{source.attribute}"
    return str(source.path.absolute()) if Path(typed).expanduser().exists() else typed


def portable(options: Options, threads: int | None) -> Options:
    """Options that mean the same in any folder, with so many threads."""
    paths = {entry.name: _absolute(getattr(options, entry.name)) for entry in dataclasses.fields(options)}
    return dataclasses.replace(options, **paths | {"threads": threads})


def _absolute(value: Any) -> Any:
    if isinstance(value, Path):
        return value.expanduser().absolute()
    return tuple(_absolute(each) for each in value) if isinstance(value, tuple) else value
