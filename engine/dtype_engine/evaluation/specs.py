"""An evaluation as plain data: a model, its inputs, and a task.

All classes here are frozen and consist of strings, numbers and paths, so they can be pickled, compared and stored.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtype_engine.core.options import NO_BASE, QUERIES, Options, RunSettings, evaluation
from dtype_engine.core.text import printable
from dtype_engine.core.user_folders import expanded
from dtype_engine.recipe import Recipe
from dtype_engine.reports.versions import versions
from dtype_engine.results.drift import DriftReport

_ARITHMETIC = ("dtype_engine", "torch", "platform")
"""The keys of `Evaluated.versions` whose versions can affect the last digits of a metric."""
_SAID = {"dtype_engine": "dtype-tui"}

if TYPE_CHECKING:
    from dtype_engine.checkpoint.source import Source
    from dtype_engine.runtime.measure.attribution import PartDrift
    from dtype_engine.runtime.scan.exact import MeasuredWeight
    from dtype_engine.runtime.scan.scanned_roundings import SharedRoundings
    from dtype_engine.runtime.scan.sequence_scans import ScannedSequence


@dataclass(frozen=True, slots=True)
class Opened:
    """The model and the inputs that a worker has to open."""

    model: str | None
    """The model as the user named it, but with an absolute path; None for the demo."""
    options: Options
    weights: str
    """The hash of the weights. A worker whose files have another hash refuses the model."""
    inputs: str
    """The hash of the inputs. A worker whose inputs have another hash refuses the model."""


@dataclass(frozen=True, slots=True)
class Exported:
    """An export and its source checkpoint, whose tensors a worker compares with each other."""

    model: str | None
    """The source checkpoint, as in `Opened`."""
    options: Options
    folder: Path
    """The absolute path of the export."""
    contents: str
    """A hash of the tensors' names, shapes and dtypes and of all files. A worker that computes another hash refuses the export."""


@dataclass(frozen=True, slots=True)
class ScanSequence:
    """Task: estimate how far the output drifts if one weight alone is cast, for every weight and each of `dtypes`. One sequence of
    the inputs is used, numbered `index` from 0. `draws` is the number of backward passes. `rounded`: where the worker finds weights
    that were rounded for it; None if it has to do so, or no dtype has a rounding.
    """

    dtypes: tuple[str, ...]
    draws: int
    index: int
    rounded: SharedRoundings | None = None


@dataclass(frozen=True, slots=True)
class ExactScore:
    """Task: measure how far the output drifts if only `weight` is cast to `dtype`, one of the scan's `dtypes`."""

    dtypes: tuple[str, ...]
    weight: str
    dtype: str


@dataclass(frozen=True, slots=True)
class RecipeDrift:
    """Task: measure how far the model's output drifts if the model is cast by a recipe."""

    recipe: Recipe
    settings: RunSettings


@dataclass(frozen=True, slots=True)
class PartAlone:
    """Task: measure how far the output drifts if the recipe casts only `modules`: the module `name` alone, or its whole subtree."""

    recipe: Recipe
    settings: RunSettings
    name: str
    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CompareTensors:
    """Task: compare exported tensors, given by their indexes in the list of all, with the values that the recipe should give. The
    result has a sentence for each wrong tensor, and None for each correct one.
    """

    indexes: tuple[int, ...]


Task = ScanSequence | ExactScore | RecipeDrift | PartAlone
"""A task that a worker runs in an open model."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A task, and the model or export that a worker has to open for it."""

    opened: Opened | Exported
    task: Task | CompareTensors


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The result of an evaluation, and where it was computed."""

    value: ScannedSequence | MeasuredWeight | DriftReport | PartDrift | tuple[str | None, ...]
    host: str
    process: int
    seconds: float
    versions: dict[str, str] = field(default_factory=dict)
    """The versions of the libraries in that process, by name, such as {"torch": "2.9.1"}."""


def other_versions(result: Evaluated) -> str:
    """Return how versions differ if that can affect metrics, as in `process 17 on node3 has torch 2.10.0 (here 2.9.1)`, else ""."""
    own = versions()
    others = [
        f"{_SAID.get(name, name)} {printable(result.versions.get(name, 'unknown'), 60)} (here {own[name]})"
        for name in _ARITHMETIC
        if result.versions.get(name) != own[name]
    ]
    return f"process {result.process} on {printable(result.host, 100)} has {' and '.join(others)}" if others else ""


def model_text(source: Source) -> str | None:
    """Return the MODEL that opens a source from any current folder: its absolute path, or a Hugging Face id. None for the demo."""
    if source.path is None or source.asked is None:
        return source.asked
    if source.kind == "python":
        return f"{source.path.absolute()}:{source.attribute}"
    return str(source.path.absolute()) if expanded(source.asked).exists() else source.asked


def portable(options: Options, threads: int | None) -> Options:
    """Return a session's options for a worker process: with absolute paths and this number of threads, and without `workers`.
    Raises UserError if the options name a reference checkpoint that no longer exists.
    """
    from dtype_engine.checkpoint.source import locate, locate_by

    named = {entry.name: _absolute(getattr(options, entry.name)) for entry in dataclasses.fields(options)}
    if options.reference_model is not None:
        named["reference"] = model_text(locate_by(options.reference_model, options))
    if options.base not in (None, NO_BASE):
        named["base"] = model_text(locate(options.base, download=options.download))
    named["metrics"] = tuple(map(_absolute_metric, options.metrics))
    return dataclasses.replace(options, **named | {"threads": threads, "workers": None})


def _absolute_metric(text: str) -> str:
    """Return an entry of `Options.metrics` with the path of the file that it names, if any, made absolute."""
    before, colon, after = text.rpartition(":")
    if (found := evaluation(text)) is not None:
        prefix, named = found
        is_file = prefix == QUERIES or Path(named).suffix in (".yaml", ".yml")
        return f"{prefix}{_absolute(Path(named))}" if is_file else text
    return f"{_absolute(Path(before))}{colon}{after}" if before.endswith(".py") else text


def _absolute(value: Any) -> Any:
    if isinstance(value, Path):
        return expanded(value).absolute()
    return tuple(_absolute(each) for each in value) if isinstance(value, tuple) else value
