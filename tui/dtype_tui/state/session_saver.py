"""The session on the disk: saved as it changes, in a thread of its own, and taken up again by `--resume`."""

from __future__ import annotations

import dataclasses
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import click

from dtype_engine.checkpoint.source import is_python
from dtype_engine.core.errors import UserError
from dtype_engine.core.options import Options, RunSettings
from dtype_engine.core.text import printable
from dtype_tui.state.session_store import SavedSession, SessionFile, canonical_model_ref, newest_session

if TYPE_CHECKING:
    from dtype_engine.recipe import History, Recipe
    from dtype_tui.state.measurement_log import MeasuredRecipe

_REST_S = 1.0
"""The least time between two saves of what is lost cheaply: where the cursor stands."""
_CLOSE_WAIT_S = 3.0


@dataclass(frozen=True, slots=True)
class Shown:
    """What of the screen is kept."""

    recipes: tuple[Recipe, ...]
    at: int
    settings: RunSettings
    cursor: str
    measured: tuple[MeasuredRecipe, ...]


class Explored(Protocol):
    """What is asked of an experiment."""

    history: History
    settings: RunSettings
    measured: list[MeasuredRecipe]


class SessionSaver:
    """Notes what is on the screen and writes it when it has changed. Nothing waits for the disk but `close`.

    `say` hears once, in a sentence, when the session can't be written; the program goes on without.
    """

    def __init__(self, model: str | None, title: str, path: Path | None, options: Options) -> None:
        self._about = SavedSession(canonical_model_ref(model), title, path, Path.cwd(), options)
        self._file = SessionFile()
        self._changed = threading.Condition()
        self._now: Shown | None = None
        self._written: Shown | None = None
        self._closed = False
        self._thread: threading.Thread | None = None
        self._trouble: str | None = None
        self.say: Callable[[str], None] = lambda trouble: None

    def note(self, experiment: Explored, cursor: str) -> None:
        """This is how things stand; called often, and cheap where nothing has changed."""
        recipes, at = experiment.history.kept
        shown = Shown(recipes, at, experiment.settings, cursor, tuple(experiment.measured))
        if shown == self._now or self._trouble is not None:
            if self._trouble:
                self.say(self._trouble)
                self._trouble = ""
            return
        with self._changed:
            self._now = shown
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="dtype-session", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Write what is not written yet, and end."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(_CLOSE_WAIT_S)

    def _work(self) -> None:
        while True:
            with self._changed:
                while self._now == self._written and not self._closed:
                    self._changed.wait()
                if self._closed and self._now == self._written:
                    return
                now = self._now
                if not self._closed and self._only_the_cursor_moved(now):
                    self._changed.wait(_REST_S)  # whatever comes meanwhile is written with it
                    now = self._now
            assert now is not None
            try:
                self._file.save(self._as_saved(now))
            except UserError as error:
                self._trouble = f"{error}; --resume will not know this session"
                return
            self._written = now

    def _only_the_cursor_moved(self, now: Shown | None) -> bool:
        before = self._written
        return now is not None and before is not None and dataclasses.replace(now, cursor=before.cursor) == before

    def _as_saved(self, shown: Shown) -> SavedSession:
        return dataclasses.replace(
            self._about,
            options=dataclasses.replace(self._about.options, settings=shown.settings),
            recipes=shown.recipes,
            at=shown.at,
            cursor=shown.cursor,
            measured=shown.measured,
            saved=datetime.now(UTC),
        )


def with_saved_options(options: Options, saved: Options, said: set[str]) -> Options:
    """The options of a saved session, but for those that were `said` on the command line (fields of Options, and of
    RunSettings), and the trust that is never saved.
    """
    settings = dataclasses.replace(
        saved.settings,
        **{f.name: getattr(options.settings, f.name) for f in dataclasses.fields(RunSettings) if f.name in said},
    )
    chosen = {
        f.name: getattr(options if f.name in said else saved, f.name)
        for f in dataclasses.fields(Options)
        if f.name not in ("settings", "trust_pickle", "trust_remote_code", "download")
    }
    return dataclasses.replace(options, **chosen, settings=settings)


def saved_session(model: str | None) -> SavedSession:
    """What `--resume` takes up: the newest session, or that of the model given. Raises UserError, also for a session that
    names Python code and that someone else could have written: the user has to name the code then.

    A module of Python that was found in the folder where the program was started is found again from any other.
    """
    saved = newest_session(model, any_model=model is None)
    if not is_python(saved.model):
        return saved
    if not saved.own:
        if model is None:
            raise UserError(
                f"the last session is of Python code, {printable(saved.model or '', 200)}, and somebody else could have written "
                "it: to run that code, name it before --resume"
            )
        return saved
    if saved.path is None and saved.folder is not None and saved.folder.is_dir():
        sys.path.insert(0, str(saved.folder))
    return saved


def exit_on_terminal_loss(last_words: Callable[[], None]) -> None:
    """Once nothing can be written to the terminal, say the last words and end.

    Textual's thread that writes ends with an error then, and its queue fills until the whole program waits for ever: a hang-up
    is not enough to end it.
    """
    before = threading.excepthook

    def hook(failed: threading.ExceptHookArgs) -> None:
        if (
            isinstance(failed.exc_value, OSError)
            and failed.thread is not None
            and failed.thread.name == "textual-output"
        ):
            try:
                last_words()
            finally:
                os._exit(128 + signal.SIGHUP)
        before(failed)

    threading.excepthook = hook


def server_disconnected() -> bool:
    """Whether nobody holds the other end of standard input any more, where the app is served to a browser: Textual does not
    look, and an app that nobody can reach would keep its model in memory for ever.
    """
    watched = select.poll()
    watched.register(sys.stdin.fileno(), select.POLLHUP)
    return any(found & select.POLLHUP for _, found in watched.poll(0))


def explicit_options() -> set[str]:
    """The names of the options that the running command was given."""
    context = click.get_current_context()
    default = click.core.ParameterSource.DEFAULT
    return {name for name in context.params if context.get_parameter_source(name) is not default}
