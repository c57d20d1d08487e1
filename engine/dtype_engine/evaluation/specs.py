"""An evaluation as plain data: which model, on which inputs, and what of it. It can be sent anywhere.

Everything here is frozen and made of texts, numbers and paths, so it can be pickled, compared and kept.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtype_engine.core.options import Options, RunSettings
from dtype_engine.core.text import printable
from dtype_engine.recipe import Recipe
from dtype_engine.reports.versions import versions
from dtype_engine.results.drift import DriftReport

_ARITHMETIC = ("dtype_engine", "torch", "platform")
"""Of `versions`: what may make another last digit of a figure."""
_SAID = {"dtype_engine": "dtype-tui"}

if TYPE_CHECKING:
    from dtype_engine.checkpoint.source import Source
    from dtype_engine.runtime.measure.attribution import PartDrift
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
class Exported:
    """An export and the checkpoint it was made of, as whoever compares them has to open them.

    model: as in `Opened`. folder: of the export, absolute. contents: fingerprint of what is compared with what.
    """

    model: str | None
    options: Options
    folder: Path
    contents: str


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
    """The drift of a recipe."""

    recipe: Recipe
    settings: RunSettings


@dataclass(frozen=True, slots=True)
class PartAlone:
    """One part of the model as a recipe casts it, everything else as the reference: its share of the causes of the drift."""

    recipe: Recipe
    settings: RunSettings
    name: str
    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CompareTensors:
    """What is wrong with some tensors of an export, by their indexes in its contents; None for nothing."""

    indexes: tuple[int, ...]


Task = ScanSequence | ExactScore | RecipeDrift | PartAlone
"""What can be asked about an open model."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What is to be evaluated: a task in an open model, or tensors of an export."""

    opened: Opened | Exported
    task: Task | CompareTensors


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What came of it: where (host and process), with which versions, and in how many seconds it was made."""

    value: ScannedSequence | MeasuredWeight | DriftReport | PartDrift | tuple[str | None, ...]
    host: str
    process: int
    seconds: float
    versions: dict[str, str] = field(default_factory=dict)


def other_versions(result: Evaluated) -> str:
    """`process 17 on node3 has torch 2.10.0 (here 2.9.1)`, where what does the arithmetic is another than here; "" where not."""
    here = versions()
    others = [
        f"{_SAID.get(name, name)} {printable(result.versions.get(name, 'unknown'), 60)} (here {here[name]})"
        for name in _ARITHMETIC
        if result.versions.get(name) != here[name]
    ]
    return f"process {result.process} on {printable(result.host, 100)} has {' and '.join(others)}" if others else ""


def model_text(source: Source) -> str | None:
    """MODEL so that it means the same in any folder: paths absolute, anything else as it was asked for."""
    if source.path is None or source.asked is None:
        return source.asked
    if source.kind == "python":
        return f"{source.path.absolute()}:{source.attribute}"
    return str(source.path.absolute()) if Path(source.asked).expanduser().exists() else source.asked


def portable(options: Options, threads: int | None) -> Options:
    """Options that mean the same in any folder, with so many threads, for one of several workers."""
    paths = {entry.name: _absolute(getattr(options, entry.name)) for entry in dataclasses.fields(options)}
    return dataclasses.replace(options, **paths | {"threads": threads, "workers": None})


def _absolute(value: Any) -> Any:
    if isinstance(value, Path):
        return value.expanduser().absolute()
    return tuple(_absolute(each) for each in value) if isinstance(value, tuple) else value
