"""The engine's life: it is told to stop, may not hear that, may end by itself, and is started again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from dtype_engine.worker import events
from dtype_tui.state.activity import Activity, Progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from dtype_engine.worker.engine import Engine
    from dtype_tui.state.scan import ScanView

Severity = Literal["information", "warning", "error"]
"""Of a sentence that is shown."""
RESTARTS = "R starts it again, with the same recipe"


class EngineLife:
    """What the engine is doing, and whether there is one. `notify` as of the controller."""

    def __init__(self, engine: Engine, scan: ScanView, notify: Callable[[str, Severity], None]) -> None:
        self._engine = engine
        self._scan = scan
        self._notify = notify
        self.activity = Activity()
        self.error: str | None = None
        """Why there is no engine; None while there is one."""
        self.quit_asked = False
        """While something was being written."""
        self._stopping: str | None = None
        """The job that was told to stop and has not (see `Activity.running`)."""
        self._stop_is_overdue = False

    def follow(self, event: Progress) -> None:
        """Take in what the engine tells of its work."""
        self.activity.follow(event)
        if isinstance(event, events.Idle) or (isinstance(event, events.Jobs) and event.running != self._stopping):
            self._stopping, self._stop_is_overdue = None, False

    def end(self, message: str) -> None:
        """The engine is gone; the recipe and what was measured stay."""
        unwritten = "; what it was writing is not there" if self.activity.saving else ""
        self._begin_anew(message)
        self.activity.busy = False
        self._notify(f"{message}{unwritten}. {RESTARTS}.", "error")

    def restart(self) -> bool:
        """End the engine, whatever it does, and start another; False where that can't be."""
        if not self._engine.can_restart:
            self._notify("the engine is a thread of this program (--in-process): it can't be started again", "warning")
            return False
        self._begin_anew(None)
        self._engine.restart()
        return True

    def _begin_anew(self, error: str | None) -> None:
        self.error = error
        self.activity.begin_anew()
        self._stopping, self._stop_is_overdue, self.quit_asked = None, False, False
        self._scan.running = self._scan.paused = False

    def begin(self, what: str) -> None:
        """The engine was asked for something that it begins at once."""
        if self.error is None:
            self.activity.begin(what)

    def expect(self, job: str) -> None:
        """The engine was asked for a job."""
        if self.error is None:
            self.activity.expect(job)
        else:
            self._notify(f"{self.error}. {RESTARTS}.", "warning")

    def may_quit(self) -> bool:
        """Whether nothing is being written; asked a second time, whether or not."""
        if not self.activity.saving or self.quit_asked:
            return True
        self.quit_asked = True
        self._notify("writing is not done: Esc stops it, and q again leaves without it", "warning")
        return False

    def idle_words(self, planning_only: bool) -> str:
        """What to say of the engine while it does nothing."""
        if self.error is not None:
            return "no engine: R starts it again"
        return "no engine: planning only" if planning_only else "ready"

    @property
    def must_end(self) -> bool:
        """Whether what runs can only be stopped with the engine."""
        return self._stop_is_overdue

    def stop(self) -> None:
        """Stop what the engine does."""
        if self.activity.busy:
            self._stopping = self.activity.running
            self._engine.cancel()

    def check_stopped(self) -> None:
        """Called some time after `stop`: where the engine is still at what it was told to stop, offer to end it."""
        if self._stopping is not None and self.activity.busy and self._engine.can_restart and not self._stop_is_overdue:
            self._stop_is_overdue = True
            self._notify(
                f"{self.activity.what}: this can't be interrupted. Esc again ends the engine and starts another with this recipe",
                "warning",
            )
