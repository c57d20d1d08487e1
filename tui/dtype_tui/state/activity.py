"""The job that the engine is running, its progress, and the jobs that wait."""

from __future__ import annotations

import time
from collections.abc import Callable

from dtype_engine.core import dtypes
from dtype_engine.core.job_pace import JobPace
from dtype_engine.core.text import printable
from dtype_engine.core.units import time_left
from dtype_engine.service import events
from dtype_tui.config.questions import row_of
from dtype_tui.rendering.cells import bar

Progress = (
    events.LoadingProgress
    | events.CastingProgress
    | events.MeasuringProgress
    | events.WorkingProgress
    | events.SavingProgress
    | events.Jobs
    | events.Idle
)


class Activity:
    """Tracks what the engine is doing, from its events and from requests that it has not begun yet. clock: returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.reset()

    def reset(self) -> None:
        self.busy = True
        self.what = "opening"
        """What the engine is doing, if it is `busy`."""
        self.share: float | None = None
        """The fraction of the running job that is done, or None if it is unknown."""
        self.running = ""
        self.waiting: tuple[str, ...] = ()
        self.saving = False
        self._pace = JobPace(self._clock)

    def now(self) -> tuple[str, float | None]:
        """Return (what the engine is doing or "" if it is idle, the fraction that is done or None if unknown)."""
        return (self.what, self.share) if self.busy else ("", None)

    @property
    def seconds_left(self) -> float | None:
        """The estimated seconds until the running job ends, or None."""
        return self._pace.seconds_left if self.busy else None

    def progress_words(self, width: int) -> str:
        """Return the running job's progress, such as ` 50 % ███ 12 s left`, or "" if unknown. width: of the bar in cells."""
        share, left = self.share, self.seconds_left
        if share is None:
            return ""
        return f"{100 * share:3.0f} % {bar(share, width)}" + (f" {time_left(left)} left" if left is not None else "")

    @property
    def queue(self) -> str:
        """The words for the waiting jobs, such as "scan, writing". A measurement that waits for another is omitted."""
        shown = (name for name in self.waiting if not (name == self.running == "measure"))
        return ", ".join(row_of(name).waiting for name in shown)

    def expect(self, job: str) -> None:
        """Show a job that was just requested, before the engine reports that it has begun."""
        if not self.busy:
            self.begin(row_of(job).running)
        elif job not in self.waiting:
            self.waiting += (job,)

    def begin(self, what: str, share: float | None = None, job: str = "") -> None:
        """Record what the engine is doing. share: the fraction that is done. job: the job to which `what` belongs; by default, the
        part of `what` before the colon, as in `measuring: reference`.
        """
        self._pace.follow(job or what.partition(":")[0], share)
        self.busy, self.what, self.share = True, printable(what), share  # an engine elsewhere may send anything

    def follow(self, event: Progress) -> None:
        match event:
            case events.LoadingProgress():
                self.begin(event.step, _share(event.done, event.total), "opening")
            case events.CastingProgress():
                rounds = any(map(dtypes.has_rounding, (rule.dtype for rule in event.recipe.rules)))
                what = "casting, with calibration runs" if rounds else f"casting {event.total:,} tensors"
                self.begin(what, _share(event.done, event.total))
            case events.MeasuringProgress():
                self.begin(f"measuring: {event.run}", _share(event.done, event.total))
            case events.WorkingProgress():
                self.begin(event.what, _share(event.done, event.total))
            case events.SavingProgress():
                self.saving = True
                self.begin(event.what, _share(event.done, event.total))
            case events.Jobs():
                self._follow_jobs(event)
            case events.Idle():
                self.busy, self.share, self.saving = False, None, False
                self._pace.follow("", None)
                self.running, self.waiting = "", ()

    def _follow_jobs(self, jobs: events.Jobs) -> None:
        """Show a job that has just begun, so that the words of the job before it end with that job."""
        first = jobs.running or next(iter(jobs.waiting), "")
        if first and (not self.busy or jobs.running not in ("", self.running)):
            self.begin(row_of(first).running)
        self.running, self.waiting = jobs.running, jobs.waiting


def _share(done: int, total: int | None) -> float | None:
    """Return done / total, or None without a total. Clamped to 0 to 1, because a remote engine may send any numbers."""
    return min(1.0, max(0.0, done / total)) if total else None
