"""What the engine does, and what waits behind it."""

from __future__ import annotations

import time
from collections.abc import Callable

from dtype_engine.core.job_pace import JobPace
from dtype_engine.core.text import printable
from dtype_engine.core.units import time_left
from dtype_engine.worker import events
from dtype_tui.rendering.cells import bar
from dtype_tui.rendering.job_names import WORDS, queue_words

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
    """As the engine tells it, and as it will be once the engine has begun what it was asked for. clock: seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.begin_anew()

    def begin_anew(self) -> None:
        """An engine has been started."""
        self.busy = True
        self.what = "opening"
        """In a few words; while it is busy."""
        self.share: float | None = None
        """How much of that is done, from 0 to 1."""
        self.running = ""
        """The job under way, by its name in `JobName`."""
        self.waiting: tuple[str, ...] = ()
        """The jobs that wait behind it."""
        self.saving = False
        """Something is being written."""
        self._pace = JobPace(self._clock)

    def now(self) -> tuple[str, float | None]:
        """What the engine does ("" while nothing), and how much of it is done."""
        return (self.what, self.share) if self.busy else ("", None)

    @property
    def seconds_left(self) -> float | None:
        """How long what runs will go on at the pace so far; None while that can't be told."""
        return self._pace.seconds_left if self.busy else None

    def progress_words(self, width: int) -> str:
        """` 50 % ███      12 s left`: how far what runs is, with a bar of `width` cells; "" where that is not known."""
        share, left = self.share, self.seconds_left
        if share is None:
            return ""
        return f"{100 * share:3.0f} % {bar(share, width)}" + (f" {time_left(left)} left" if left is not None else "")

    @property
    def queue(self) -> str:
        """What waits behind the job under way, in its order."""
        return queue_words(self.running, self.waiting)

    def expect(self, job: str) -> None:
        """A job was asked of the engine: it is on the screen before the engine says so."""
        if not self.busy:
            self.begin(WORDS[job][0])
        elif job not in self.waiting:
            self.waiting += (job,)

    def begin(self, what: str, share: float | None = None, job: str = "") -> None:
        """This is under way now, as a part of `job`: by default what is before the colon, since a measurement's passes take turns,
        and their shares are of the whole.
        """
        self._pace.follow(job or what.partition(":")[0], share)
        self.busy, self.what, self.share = True, printable(what), share  # it may be a name of an engine's elsewhere

    def follow(self, event: Progress) -> None:
        """The engine tells how far it is."""
        match event:
            case events.LoadingProgress():
                self.begin(event.step, _share(event.done, event.total), "opening")
            case events.CastingProgress():
                self.begin(f"casting {event.total:,} tensors", _share(event.done, event.total))
            case events.MeasuringProgress():
                self.begin(f"measuring: {event.run}", _share(event.done, event.total))
            case events.WorkingProgress():
                self.begin(event.what, _share(event.done, event.total))
            case events.SavingProgress():
                self.saving = True
                self.begin(event.what, _share(event.done, event.total))
            case events.Jobs():
                self.running, self.waiting = event.running, event.waiting
            case events.Idle():
                self.busy, self.share, self.saving = False, None, False
                self._pace.follow("", None)
                self.running, self.waiting = "", ()


def _share(done: int, total: int | None) -> float | None:
    """From 0 to 1; None of a whole that is not known. An engine elsewhere may say anything."""
    return min(1.0, max(0.0, done / total)) if total else None
