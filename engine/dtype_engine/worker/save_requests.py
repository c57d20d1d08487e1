"""What the app may ask the worker to write: a checkpoint, a recipe file, a report, a recipe for another tool.

Nothing replaces what is there unless the request says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import dtype_engine
from dtype_engine.worker.message import Message

if TYPE_CHECKING:
    import dtype_engine.results.drift
    import dtype_engine.results.losses


class ExportRequest(Message, frozen=True):
    """A checkpoint in the dtypes of the recipe in force."""

    folder: Path
    replace: bool = False


class RecipeRequest(Message, frozen=True):
    """The recipe in force, with its settings and, where it was measured, the figures. as_text: see `ConvertRequest`."""

    file: Path
    replace: bool = False
    drift: dtype_engine.results.drift.DriftReport | None = None
    as_text: bool = False


class ReportRequest(Message, frozen=True):
    """A report of the recipe in force; measured for it where `drift` is not given."""

    file: Path
    replace: bool = False
    drift: dtype_engine.results.drift.DriftReport | None = None


class ConvertRequest(Message, frozen=True):
    """The recipe in force in the words of another tool. as_text: the text is told, and written by whoever asked for it, on another
    machine.
    """

    file: Path
    target: str
    replace: bool = False
    as_text: bool = False


SaveRequest = ExportRequest | RecipeRequest | ReportRequest | ConvertRequest


class ExportPlan(Message, frozen=True):
    """What an export would write. nbytes: of all tensors, scales included; loading: what `from_pretrained` makes of it; lost: the
    weights whose cast loses values, None where that is not known yet.
    """

    nbytes: int
    files: int
    dtypes: tuple[tuple[str, int, int], ...]
    loading: str
    notices: tuple[str, ...] = ()
    lost: tuple[dtype_engine.results.losses.ValueLoss, ...] | None = ()
