"""`--resume`: which saved session to take up, and its options beside those of the command line."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Set

from dtype_engine.checkpoint.source import is_python
from dtype_engine.core.errors import UserError
from dtype_engine.core.options import Options, RunSettings
from dtype_engine.core.text import printable
from dtype_tui.state.addresses import is_address
from dtype_tui.state.session_store import SavedSession, newest_session


def with_saved_options(options: Options, saved: Options, explicit: Set[str]) -> Options:
    """The options of a saved session, but for those in `explicit`, which the command line gave (names of fields of Options and
    RunSettings), and the trust, which is never saved.
    """
    settings = dataclasses.replace(
        saved.settings,
        **{f.name: getattr(options.settings, f.name) for f in dataclasses.fields(RunSettings) if f.name in explicit},
    )
    chosen = {
        f.name: getattr(options if f.name in explicit else saved, f.name)
        for f in dataclasses.fields(Options)
        if f.name not in ("settings", "trust_pickle", "trust_remote_code", "download")
    }
    return dataclasses.replace(options, **chosen, settings=settings)


def saved_session(model: str | None) -> SavedSession:
    """What `--resume` takes up: the newest session, or that of the model given. Raises UserError, also for a session that
    names Python code and that someone else could have written: the user has to name the code then.

    The folder that the session was started in joins `sys.path`, so that a Python module that was found there is found again.
    """
    saved = newest_session(model)
    if not is_python(saved.model):
        return saved
    if not saved.own:
        if model is None:
            raise UserError(
                f"the last session is of Python code, {printable(saved.model or '', 200)}, and somebody else could have written "
                "it: to run that code, name it before --resume"
            )
        return saved
    if saved.path is None and not is_address(saved.model) and saved.folder is not None and saved.folder.is_dir():
        sys.path.insert(0, str(saved.folder))
    return saved
