"""An evaluation as plain data: a model, its inputs, and a task. It can be sent to another process.

All classes here are frozen and consist of strings, numbers and paths, so their objects can be pickled, compared and stored.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtype_engine.core.options import LM_EVAL, Options, RunSettings
from dtype_engine.core.text import printable
from dtype_engine.recipe import Recipe
from dtype_engine.reports.versions import versions
from dtype_engine.results.drift import DriftReport

_ARITHMETIC = ("dtype_engine", "torch", "platform")
"""The libraries, as keys of `Evaluated.versions`, whose version can affect the last digits of a metric."""
_SAID = {"dtype_engine": "dtype-tui"}

if TYPE_CHECKING:
    from dtype_engine.checkpoint.source import Source
    from dtype_engine.runtime.measure.attribution import PartDrift
    from dtype_engine.runtime.scan.exact import MeasuredWeight
    from dtype_engine.runtime.scan.scan import ScannedSequence


@dataclass(frozen=True, slots=True)
class Opened:
    """Identifies the model and the inputs that a worker has to open."""

    model: str | None
    """The text that names the model, as on the command line, but with an absolute path; None for the demo."""
    options: Options
    weights: str
    """The fingerprint of the weights. A worker refuses a model with another fingerprint."""
    inputs: str
    """The fingerprint of the inputs. A worker refuses inputs with another fingerprint."""


@dataclass(frozen=True, slots=True)
class Exported:
    """An export and the checkpoint that it was made from, which a worker compares."""

    model: str | None
    """The text that names the source checkpoint, as on the command line, but with an absolute path; None for the demo."""
    options: Options
    folder: Path
    """The absolute path of the export."""
    contents: str
    """The fingerprint of the compared tensors. A worker refuses tensors with another fingerprint."""


@dataclass(frozen=True, slots=True)
class ScanSequence:
    """Task: on one sequence, estimate for every weight and each of `dtypes` how far the output drifts if this weight alone is cast.
    `draws` is the number of backward passes, and `index` says which sequence.
    """

    dtypes: tuple[str, ...]
    draws: int
    index: int


@dataclass(frozen=True, slots=True)
class ExactScore:
    """Task: measure how far the output drifts if the weight `weight` alone is cast to `dtype`. `dtypes` are all dtypes of the scan
    to which this score belongs.
    """

    dtypes: tuple[str, ...]
    weight: str
    dtype: str


@dataclass(frozen=True, slots=True)
class RecipeDrift:
    """Task: measure the drift of a recipe."""

    recipe: Recipe
    settings: RunSettings


@dataclass(frozen=True, slots=True)
class PartAlone:
    """Task: measure how far the output drifts if only one module or subtree is cast as the recipe says, and nothing else."""

    recipe: Recipe
    settings: RunSettings
    name: str
    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CompareTensors:
    """Task: compare tensors of an export with what its recipe computes. `indexes` are their positions in the export's plan. The
    result says for each tensor what is wrong, or None.
    """

    indexes: tuple[int, ...]


Task = ScanSequence | ExactScore | RecipeDrift | PartAlone
"""The tasks that a worker runs in an open model."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A task, with the model or export that it needs."""

    opened: Opened | Exported
    task: Task | CompareTensors


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The result of an evaluation, and the machine, process and versions with which it was computed."""

    value: ScannedSequence | MeasuredWeight | DriftReport | PartDrift | tuple[str | None, ...]
    host: str
    """The machine that ran the evaluation."""
    process: int
    """The ID of the process that ran the evaluation."""
    seconds: float
    versions: dict[str, str] = field(default_factory=dict)
    """The versions of the libraries in that process, by name."""


def other_versions(result: Evaluated) -> str:
    """Return the version differences that can affect metrics: `process 17 on node3 has torch 2.10.0 (here 2.9.1)`; "" if none."""
    own = versions()
    others = [
        f"{_SAID.get(name, name)} {printable(result.versions.get(name, 'unknown'), 60)} (here {own[name]})"
        for name in _ARITHMETIC
        if result.versions.get(name) != own[name]
    ]
    return f"process {result.process} on {printable(result.host, 100)} has {' and '.join(others)}" if others else ""


def model_text(source: Source) -> str | None:
    """Return the command-line argument MODEL for a source in a form that means the same in any working directory: paths become
    absolute, other forms stay unchanged.
    """
    if source.path is None or source.asked is None:
        return source.asked
    if source.kind == "python":
        return f"{source.path.absolute()}:{source.attribute}"
    return str(source.path.absolute()) if Path(source.asked).expanduser().exists() else source.asked


def portable(options: Options, threads: int | None) -> Options:
    """Return the options for a worker process. Paths become absolute, including that of a reference checkpoint, so that they mean
    the same in any folder. `threads` is set, and `workers` is None.

    Raises UserError if the options name a reference checkpoint that no longer exists.
    """
    from dtype_engine.checkpoint.source import locate

    named = {entry.name: _absolute(getattr(options, entry.name)) for entry in dataclasses.fields(options)}
    if options.reference_model is not None:
        named["reference"] = model_text(locate(options.reference_model, options.trust_pickle, options.download))
    named["metrics"] = tuple(map(_absolute_metric, options.metrics))
    return dataclasses.replace(options, **named | {"threads": threads, "workers": None})


def _absolute_metric(text: str) -> str:
    """Return an entry of `Options.metrics`. If it names a file, the path of this file is made absolute."""
    before, colon, after = text.rpartition(":")
    if text.startswith(LM_EVAL):
        return f"{LM_EVAL}{_absolute(Path(after))}" if Path(after).suffix in (".yaml", ".yml") else text
    return f"{_absolute(Path(before))}{colon}{after}" if before.endswith(".py") else text


def _absolute(value: Any) -> Any:
    if isinstance(value, Path):
        return value.expanduser().absolute()
    return tuple(_absolute(each) for each in value) if isinstance(value, tuple) else value
