"""What a measurement tells while it runs, and what it asks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dtype_engine.core.cancellation import IsCancelled, never

if TYPE_CHECKING:
    from dtype_engine.results.drift import ModuleDrift
    from dtype_engine.runtime.measure.running_totals import RunningTotals

OnProgress = Callable[[str, int, int], None]
OnModules = Callable[[tuple["ModuleDrift", ...]], None]
OnSequence = Callable[["RunningTotals"], None]


@dataclass(frozen=True, slots=True)
class MeasurementListener:
    """Functions that a measurement calls in its own thread. The defaults ignore all, and want all inputs run.

    Example:
        >>> session.drift(MeasurementListener(on_progress=lambda run, done, total: None)).output.max_abs
        0.0
    """

    on_progress: OnProgress = lambda run, done, total: None
    """`on_progress("reference" | "candidate", done, total)` counts elements of the inputs over all passes that are to be run; at
    most ten times a second."""
    on_modules: OnModules | None = None
    """Is given the modules whose figures changed, at most once a second within a pass."""
    on_sequence: OnSequence | None = None
    """Is called after every sequence with the sums so far, which grow with the next one."""
    cancelled: IsCancelled = never
    """Asked between module calls: whether to stop, by raising Cancelled."""
    precision: Callable[[], float | None] | None = None
    """Asked after every sequence for the relative standard error of the main figure that is enough; None: all inputs are run.
    Without it `Session.drift` takes that of its options."""
    all_modules: Callable[[], bool] | None = None
    """Asked before each pass and after the last: whether modules are compared in every sequence, not in some. Sequences in which
    they were not are then run again. Without it `Session.drift` takes what its options say."""
