"""The callbacks of a measurement: what it reports while it runs, and what it asks the caller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dtype_engine.core.cancellation import IsCancelled, never

if TYPE_CHECKING:
    from dtype_engine.results.drift import DriftReport, ModuleDrift
    from dtype_engine.runtime.measure.running_totals import RunningTotals

OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class MeasurementListener:
    """Functions that a measurement calls in its own thread. By default, nothing is reported and all inputs are run.

    Example:
        >>> session.drift(MeasurementListener(on_progress=lambda run, done, total: None)).output.max_abs
        0.0
    """

    on_progress: OnProgress = lambda run, done, total: None
    """Called at most ten times a second as `on_progress(run, done, total)`. run: "reference" or "candidate". done, total: the
    number of finished input elements and the number of all, counted over all passes of the measurement. For a model that is larger
    than memory, run is "values that casts lose" at the end, and done and total are numbers of weights.
    """
    on_modules: Callable[[tuple[ModuleDrift, ...]], None] | None = None
    """Called with the drift of the modules whose metrics have changed, at most once a second within a pass."""
    on_sequence: Callable[[RunningTotals], None] | None = None
    """Called after every sequence with the running totals. Later sequences change the same object."""
    on_measured: Callable[[DriftReport], None] | None = None
    """Called with the report when all passes have ended, before the last steps, which may take long: counting the values that the
    casts of a model larger than memory lose, the user's metrics, and the acceptance of a draft head. The report lacks both, and its
    `lost` is None if such values are still to be counted.
    """
    on_unsaved: Callable[[str], None] | None = None
    """Called with the reason if the measurement can't be saved; it then continues unsaved. If None, UserError is raised."""
    saves: bool = False
    """Whether `on_sequence` saves the totals. Fewer sequences then run side by side, so that an interrupt loses fewer results."""
    cancelled: IsCancelled = never
    """Called between module calls. If it returns True, the measurement raises Cancelled."""
    precision: Callable[[], float | None] | None = None
    """Called after every sequence. Returns the relative standard error at which the measurement may stop, or None to run all
    inputs. If it is not set, `Session.drift` uses the value in its options.
    """
    all_modules: Callable[[], bool] | None = None
    """Called before each pass and at the end. Returns whether to compare modules in every sequence, or only in some. If it returns
    True at the end, the sequences without module comparison run again. If it is not set, `Session.drift` uses its options.
    """
