"""The engine's life: it is told to stop, may not hear that, may end by itself, and is started again."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal

from dtype_engine.worker import events
from dtype_engine.worker.commands import Cancel
from dtype_tui.state.activity import Activity, Progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from dtype_engine.worker.engine import Engine
    from dtype_tui.state.scan import ScanState

Severity = Literal["information", "warning", "error"]
"""Of a sentence that is shown."""
RESTARTS = "R starts it again"
STOP_WAIT_S = 2.0
"""What has not stopped so long after it was told to is offered to be ended with the engine."""


class EngineLife:
    """What the engine is doing, and whether there is one. `notify` and `changed` as of the controller."""

    def __init__(
        self,
        engine: Engine,
        scan: ScanState,
        notify: Callable[[str, Severity], None],
        changed: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._scan = scan
        self._notify = notify
        self._changed = changed
        self.activity = Activity()
        self.error: str | None = None
        """Why there is no engine; None while there is one."""
        self.lost = False
        """Whether the connection to it is cut."""
        self.quit_asked = False
        """While something was being written."""
        self._stopping: str | None = None
        """The job that was told to stop and has not (see `Activity.running`)."""
        self._stopping_since = 0.0
        self.must_end = False
        """Whether what runs can only be stopped with the engine."""

    def follow(self, event: Progress) -> None:
        self.activity.follow(event)
        if isinstance(event, events.Idle) or (isinstance(event, events.Jobs) and event.running != self._stopping):
            self._stopping, self.must_end = None, False

    def note_stopped(self, job: str | None) -> None:
        """The engine has stopped `job`; None where nothing had begun."""
        if job is not None:
            self._stopping, self.must_end = None, False

    def follow_connection(self, event: events.EngineEnded | events.EngineLost | events.EngineBack) -> None:
        """The engine is gone, out of reach, or there again; the recipe and what was measured stay."""
        match event:
            case events.EngineEnded():
                lost = self._begin_anew(event.message)
                self.activity.busy = False
                self._notify("; ".join((event.message, *lost, RESTARTS)), "error")
            case events.EngineLost():
                self.lost = True
                self._notify(f"{event.message}: the engine goes on there; R starts another", "warning")
            case events.EngineBack():
                self.lost = False
                self._notify("connected again: nothing was lost", "information")

    def restart(self) -> bool:
        """End the engine, whatever it does, and start another; False where that can't be."""
        if not self._engine.can_restart:
            self._notify("the engine is a thread of this program (--in-process): it can't be started again", "warning")
            return False
        lost = self._begin_anew(None)
        if lost:
            self._notify("; ".join(lost), "warning")
        self._engine.restart()
        return True

    def _begin_anew(self, error: str | None) -> list[str]:
        """What was under way is over; sentences on what of it is lost."""
        lost = ["what it was writing is not there"] if self.activity.saving else []
        if self._scan.lose():
            lost.append("s goes on with the scan")
        self.error = error
        self.activity.begin_anew()
        self._stopping, self.must_end, self.quit_asked, self.lost = None, False, False, False
        return lost

    def begin(self, what: str) -> None:
        """The engine was asked for something that it begins at once."""
        if self.error is None:
            self.activity.begin(what)

    def expect(self, job: str) -> None:
        if self.is_there():
            self.activity.expect(job)

    def is_there(self) -> bool:
        """Whether there is an engine; says that there is none."""
        if self.error is not None:
            self._notify(self.no_engine_words, "warning")
        return self.error is None

    def may_quit(self) -> bool:
        """Whether nothing is being written; asked a second time, whether or not."""
        if not self.activity.saving or self.quit_asked:
            return True
        self.quit_asked = True
        self._notify("writing is not done: Esc stops it, and q again leaves without it", "warning")
        return False

    @property
    def no_engine_words(self) -> str:
        """What to say where figures would be, while there is no engine; "" while there is one."""
        return f"no engine: {RESTARTS}" if self.error is not None else ""

    def idle_words(self, planning_only: bool) -> str:
        """What to say of the engine while it does nothing."""
        if self.lost:
            return "connection cut: trying again"
        return self.no_engine_words or ("no live model: planning only" if planning_only else "ready")

    def stop(self, job: str | None = None) -> None:
        """Stop what the engine does and drop what waits; or one job, by its name, alone."""
        if self.activity.busy:
            if self._stopping is None and job in (None, self.activity.running):
                self._stopping, self._stopping_since = self.activity.running, time.monotonic()
            self._engine.request(Cancel(job or None))
            self._changed()

    def current_activity(self) -> tuple[str, float | None, str]:
        """What the engine does ("" while nothing), how much of it is done, and what Esc does now."""
        what, share = self.activity.now()
        if not what or self.lost:
            return "", None, ""
        if self.must_end:
            return f"not stopped: {what}", None, "Esc again ends the engine"
        if self._stopping is not None:
            return f"stopping: {what}", None, ""
        return what, share, "Esc stops"

    def check_stopped(self) -> None:
        """Called `STOP_WAIT_S` after `stop`: where the engine is still at what it was told to stop, offer to end it."""
        if self._stopping is None or self.must_end or not self.activity.busy or not self._engine.can_restart:
            return
        if self.lost:
            return
        if time.monotonic() - self._stopping_since >= STOP_WAIT_S - 0.1:  # not told again just now to stop another
            self.must_end = True
            offer = "Esc again ends the engine and starts another, with this recipe"
            self._notify(f"{self.activity.what} has not stopped: {offer}", "warning")
            self._changed()
