"""Tracks the engine's lifetime: stopped jobs, its unexpected end, a lost connection, and restarts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal

from dtype_engine.core.units import plural
from dtype_engine.service import events
from dtype_engine.service.commands import Cancel
from dtype_tui.config.questions import row_of
from dtype_tui.state.activity import Activity, Progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from dtype_engine.service.engine import Engine
    from dtype_tui.state.scan import ScanState

Severity = Literal["information", "warning", "error"]
RESTARTS = "R starts it again"
STOP_WAIT_S = 2.0
"""Number of seconds within which a job should stop. After that, the app offers to end the engine."""


class EngineLife:
    """Tracks whether there is an engine, and what the engine is doing.

    notify: shows a sentence until the user has read it. changed: redraws the screen. withdraw: hides a sentence that `notify`
    shows.
    """

    def __init__(
        self,
        engine: Engine,
        scan: ScanState,
        notify: Callable[[str, Severity], None],
        changed: Callable[[], None],
        withdraw: Callable[[str], None],
    ) -> None:
        self._engine = engine
        self._scan = scan
        self._notify = notify
        self._changed = changed
        self._withdraw = withdraw
        self.activity = Activity()
        self.error: str | None = None
        """Why there is no engine, or None while there is one."""
        self.lost = False
        self._warned_about: tuple[bool, int] | None = None
        """What the user was warned about when quitting: whether files are being written, and how many rules would be lost."""
        self._quit_warning = ""
        """The sentence of that warning."""
        self._stopping: str | None = None
        """The running job that was asked to stop."""
        self._stopping_since = 0.0
        self.must_end = False
        """Whether the running job has not stopped within `STOP_WAIT_S`, so that only ending the engine stops it."""
        self._offer = ""
        """The sentence on the screen that offers to end the engine, or ""."""

    def follow(self, event: Progress) -> None:
        self.activity.follow(event)
        if isinstance(event, events.Idle) or (isinstance(event, events.Jobs) and event.running != self._stopping):
            self._stop_ended()

    def _stop_ended(self) -> None:
        self._stopping, self.must_end = None, False
        if self._offer:
            self._withdraw(self._offer)
            self._offer = ""

    def note_stopped(self, event: events.Stopped) -> None:
        """Tell the user which job has stopped and which waiting ones were dropped, such as `stopped: timing; t times again`."""
        rest = ", ".join(row_of(name).waiting for name in event.dropped)
        if event.job is None:
            self._notify(f"stopped before it began: {rest}", "information")
            return
        self._stop_ended()
        row = row_of(event.job)
        self._notify(f"stopped: {row.running}; {row.again}" + (f". Not begun: {rest}" if rest else ""), "information")

    def follow_connection(self, event: events.EngineEnded | events.EngineLost | events.EngineBack) -> None:
        """Record that the engine ended, or that its connection was lost or restored."""
        match event:
            case events.EngineEnded():
                lost = self._reset(event.message)
                self.activity.busy = False
                self._notify("; ".join((event.message, *lost, RESTARTS)), "error")
            case events.EngineLost():
                self.lost = True
                self._notify(f"{event.message}: the engine keeps running there; R starts another", "warning")
            case events.EngineBack():
                self.lost = False
                self._notify("connected again: nothing was lost", "information")

    def restart(self) -> bool:
        """Start another engine in place of this one. Returns False if it can't be restarted."""
        if not self._engine.can_restart:
            self._notify("the engine is a thread of this program (--in-process): it can't be restarted", "warning")
            return False
        lost = self._reset(None)
        if lost:
            self._notify("; ".join(lost), "warning")
        self._engine.restart()
        return True

    def _reset(self, error: str | None) -> list[str]:
        """Record that no job is running, and return what is lost, as parts of a sentence. error: the new `self.error`."""
        lost = ["the files that it was writing are lost"] if self.activity.saving else []
        if self._scan.lose():
            lost.append("s resumes the scan")
        self.error = error
        self.activity.reset()
        self._stop_ended()
        self.lost = False
        self._warned_about = None
        return lost

    def begin(self, what: str) -> None:
        """Show that the engine is doing `what`, before the engine reports it. For jobs that wait in the queue, `expect` is used."""
        if self.error is None:
            self.activity.begin(what)

    def expect(self, job: str) -> None:
        if self.is_available():
            self.activity.expect(job)

    def is_available(self) -> bool:
        """Return whether there is an engine. If there is none, notify the user."""
        if self.error is not None:
            self._notify(self.no_engine_words, "warning")
        return self.error is None

    def may_quit(self, lost_rules: int = 0) -> bool:
        """Return whether the app may quit. If files are being written or rules would be lost, the first call warns and returns
        False. A second call for the same reason returns True. lost_rules: the number of rules that neither a file nor a session
        keeps.
        """
        about = self.activity.saving, lost_rules
        if about in ((False, 0), self._warned_about):
            return True
        self._warned_about = about
        if self.activity.saving:
            words = "writing is not finished: Esc stops it, and q again quits without it"
        else:
            words = f"{plural(lost_rules, 'rule')} would be lost: e saves the recipe, and q again quits without it"
        self._quit_warning = words
        self._notify(words, "warning")
        return False

    def forget_warning(self) -> None:
        """Hide the last warning of `may_quit` and let its next call warn again, because the reason for it has changed."""
        if self._warned_about is not None:
            self._withdraw(self._quit_warning)
        self._warned_about = None

    @property
    def no_engine_words(self) -> str:
        """What to show in place of drift while there is no engine, or ""."""
        return f"no engine: {RESTARTS}" if self.error is not None else ""

    def idle_words(self, planning_only: bool) -> str:
        """Return what the status line shows while the engine is idle. planning_only: whether the model could not be opened."""
        if self.lost:
            return "connection cut: trying again"
        return self.no_engine_words or ("no live model: planning only" if planning_only else "ready")

    def stop(self, job: str | None = None) -> None:
        """Ask the engine to stop the running job and drop all waiting jobs. job: if given, only jobs with this name end."""
        if self.activity.busy:
            if self._stopping is None and job in (None, self.activity.running):
                self._stopping, self._stopping_since = self.activity.running, time.monotonic()
            self._engine.request(Cancel(job or None))
            self._changed()

    def current_activity(self) -> tuple[str, float | None, str]:
        """Return (what the engine is doing or "", the fraction that is done or None, what Esc does now if not just to stop it)."""
        what, share = self.activity.now()
        if not what or self.lost:
            return "", None, ""
        if self.must_end:
            return f"not stopped: {what}", None, "Esc again ends the engine"
        if self._stopping is not None:
            return f"stopping: {what}", None, ""
        return what, share, ""

    def check_stopped(self) -> None:
        """Offer to end the engine if a job still runs `STOP_WAIT_S` seconds after it was asked to stop."""
        if self._stopping is None or self.must_end or not self.activity.busy:
            return
        if self.lost or not self._engine.can_restart:
            return
        if time.monotonic() - self._stopping_since >= STOP_WAIT_S - 0.1:  # a later stop has its own check
            self.must_end = True
            offer = "Esc again ends the engine and starts another, with this recipe"
            self._offer = f"{self.activity.what} has not stopped: {offer}"
            self._notify(self._offer, "warning")
            self._changed()
