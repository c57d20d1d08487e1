"""What the app may ask the worker to write: a checkpoint, a recipe file, a report, a recipe for another tool.

Nothing replaces what is there unless the request says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dtype_engine.results.drift import DriftReport
from dtype_engine.results.losses import ValueLoss


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """A checkpoint in the dtypes of the recipe in force."""

    folder: Path
    replace: bool = False


@dataclass(frozen=True, slots=True)
class RecipeRequest:
    """The recipe in force, with its settings and, where it was measured, the figures. as_text: see `ConvertRequest`."""

    file: Path
    replace: bool = False
    drift: DriftReport | None = None
    as_text: bool = False


@dataclass(frozen=True, slots=True)
class ReportRequest:
    """A report of the recipe in force; measured for it where `drift` is not given."""

    file: Path
    replace: bool = False
    drift: DriftReport | None = None


@dataclass(frozen=True, slots=True)
class ConvertRequest:
    """The recipe in force in the words of another tool. as_text: the text is told, and written by whoever asked for it, on another
    machine.
    """

    file: Path
    target: str
    replace: bool = False
    as_text: bool = False


SaveRequest = ExportRequest | RecipeRequest | ReportRequest | ConvertRequest


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """What an export would write. nbytes: of all tensors, scales included; loading: what `from_pretrained` makes of it; lost: the
    weights whose cast loses values, None where that is not known yet.
    """

    nbytes: int
    files: int
    dtypes: tuple[tuple[str, int, int], ...]
    loading: str
    notices: tuple[str, ...] = ()
    lost: tuple[ValueLoss, ...] | None = ()
