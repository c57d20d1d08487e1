"""Saves the session to disk whenever it changes, in a separate thread."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from dtype_engine.core.errors import UserError
from dtype_engine.core.options import Options
from dtype_tui.state.session_store import SavedSession, SessionFile, canonical_model_ref

if TYPE_CHECKING:
    from dtype_tui.state.experiment import Experiment

_REST_S = 1.0
"""Minimum number of seconds between two saves if only the cursor has moved."""
_CLOSE_WAIT_S = 3.0
"""Maximum number of seconds that the app waits for the last save when it ends."""


class SessionSaver:
    """Writes the session to disk in a thread of its own whenever it has changed. Only `close` waits for the disk. If writing fails,
    `say` is called once with a sentence, and nothing is saved any more.

    A signal can interrupt `update` or `close`, and its handler then calls both, so neither may hold a lock that the thread needs.
    """

    def __init__(self, model: str | None, title: str, path: Path | None, options: Options) -> None:
        if options.reference_model is not None:
            named = canonical_model_ref(options.reference_model) or "demo"
            options = dataclasses.replace(options, reference=named)
        self._about = SavedSession(canonical_model_ref(model), title, path, Path.cwd(), options)
        self._file = SessionFile()
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """False wakes the writing thread after a change of `_now`; True ends it."""
        self._now: SavedSession | None = None
        self._written: SavedSession | None = None
        self._trouble: str | None = None
        self.say: Callable[[str], None] = lambda trouble: None
        self._thread = threading.Thread(target=self._work, name="dtype-session", daemon=True)
        self._thread.start()

    @property
    def works(self) -> bool:
        return self._trouble is None

    def update(self, experiment: Experiment, cursor: str) -> None:
        """Save the state if it has changed. cursor: the node under the cursor. Called several times a second."""
        rule_lists, at = experiment.history.kept
        options = dataclasses.replace(self._about.options, settings=experiment.settings)
        session = dataclasses.replace(
            self._about,
            options=options,
            rule_lists=rule_lists,
            at=at,
            cursor=cursor,
            measured=experiment.measured,
            scanned=experiment.scan.requested,
            context=experiment.served.context,
            batch=experiment.served.batch,
            budget=experiment.served.budget,
        )
        if session == self._now or self._trouble is not None:
            if self._trouble:
                self.say(self._trouble)
                self._trouble = ""
            return
        self._now = session
        self._wake.put(False)

    def close(self) -> None:
        self._wake.put(True)
        self._thread.join(_CLOSE_WAIT_S)

    def _work(self) -> None:
        closed = False
        while not closed:
            closed = self._wake.get()
            if not closed and self._only_the_cursor_moved(self._now):
                with contextlib.suppress(queue.Empty):
                    closed = self._wake.get(timeout=_REST_S)  # changes until then are written together
            now = self._now
            if now is None or now == self._written:
                continue
            try:
                self._file.save(dataclasses.replace(now, saved=datetime.now(UTC)))
            except UserError as error:
                self._trouble = f"{error}; --resume will not know this session"
                return
            self._written = now

    def _only_the_cursor_moved(self, now: SavedSession | None) -> bool:
        before = self._written
        return now is not None and before is not None and dataclasses.replace(now, cursor=before.cursor) == before
