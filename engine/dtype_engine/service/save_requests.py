"""Requests to write a checkpoint, a recipe file or a report. Existing files are replaced only if `replace` is set."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import dtype_engine
from dtype_engine.core.file_layouts import COMPRESSED_TENSORS
from dtype_engine.service.message import Message

if TYPE_CHECKING:
    import dtype_engine.results.attribution
    import dtype_engine.results.drift
    import dtype_engine.results.losses
    import dtype_engine.results.runs


class ExportRequest(Message, frozen=True):
    """Write a checkpoint in the dtypes of the current recipe."""

    folder: Path
    replace: bool = False
    layout: str = COMPRESSED_TENSORS
    """The layout of weights with scales: a name of `core.file_layouts`."""


class RecipeRequest(Message, frozen=True):
    """Write the current recipe to a file, with its settings and, if it was measured, its metrics."""

    file: Path
    replace: bool = False
    drift: dtype_engine.results.drift.DriftReport | None = None
    as_text: bool = False
    """Whether to send the text to the app, which writes the file itself because it runs on another machine."""


class ReportRequest(Message, frozen=True):
    """Write a report of the current recipe, in HTML or Markdown."""

    file: Path
    replace: bool = False
    drift: dtype_engine.results.drift.DriftReport | None = None
    """A measurement of the recipe. If None, the recipe is measured for the report."""
    nonfinite: dtype_engine.results.attribution.NonFiniteDiagnosis | None = None
    """The module in which values stop being finite. None if all are finite, or if the app has not received it yet."""
    speed: dtype_engine.results.runs.SpeedReport | None = None
    """The times of forward passes. If None, the report has no times; they are not measured for it."""


class ConvertRequest(Message, frozen=True):
    """Write the current recipe for another tool: `target`, such as "torchao"."""

    file: Path
    target: str
    replace: bool = False
    as_text: bool = False
    """As in `RecipeRequest`."""


SaveRequest = ExportRequest | RecipeRequest | ReportRequest | ConvertRequest


class ExportPlan(Message, frozen=True):
    """What an export would write: its bytes, files and dtypes."""

    nbytes: int
    """Bytes of all tensors, scales included."""
    files: int
    dtypes: tuple[tuple[str, int, int], ...]
    """For each dtype, its name, how many tensors have it, and their bytes."""
    loading: str
    """A sentence that names the dtypes in which `from_pretrained` would load the export."""
    notices: tuple[str, ...] = ()
    lost: tuple[dtype_engine.results.losses.ValueLoss, ...] | None = ()
    """The weights in which casts make values infinite, make them zero or clip them. None if they were not counted yet."""
    no_one_file: str = ""
    """Why one file of weights can't hold the export, or "" if it can."""
