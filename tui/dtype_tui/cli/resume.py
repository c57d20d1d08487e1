"""`--resume`: chooses the saved session, and combines its options with those of the command line."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Set

from dtype_engine.checkpoint.source import is_python
from dtype_engine.core.errors import UserError
from dtype_engine.core.options import Options, RunSettings
from dtype_engine.core.text import printable
from dtype_tui.state.addresses import is_address
from dtype_tui.state.session_store import NOT_KEPT, SavedSession, newest_session


def with_saved_options(options: Options, saved: Options, explicit: Set[str]) -> Options:
    """Return the options of a resumed session. Those named in `explicit`, which the command line sets, come from `options`, and so
    do those in `NOT_KEPT`, such as permissions to run code. All others come from `saved`.
    """
    settings = dataclasses.replace(
        saved.settings,
        **{f.name: getattr(options.settings, f.name) for f in dataclasses.fields(RunSettings) if f.name in explicit},
    )
    chosen = {
        f.name: getattr(options if f.name in explicit else saved, f.name)
        for f in dataclasses.fields(Options)
        if f.name not in {"settings", *NOT_KEPT}
    }
    return dataclasses.replace(options, **chosen, settings=settings)


def saved_session(model: str | None) -> SavedSession:
    """Return the newest saved session of `model`, or of any model if `model` is None. If the session's model is a Python module,
    the folder in which the session was started is added to `sys.path`.

    Raises UserError if there is no session. A session that another user could have written is also refused if it could run code
    here: if it names a cluster, or Python code that the command line does not name.
    """
    saved = newest_session(model)
    if isinstance(saved.options.workers, str) and not saved.own:
        raise UserError(
            f"the last session works on the cluster at {printable(saved.options.workers, 200)}, and someone else could have "
            "written it: open the model without --resume"
        )
    if not is_python(saved.model):
        return saved
    if not saved.own:
        if model is None:
            raise UserError(
                f"the last session is of Python code, {printable(saved.model or '', 200)}, and someone else could have written "
                "it: to run that code, name it before --resume"
            )
        return saved
    if saved.path is None and not is_address(saved.model) and saved.folder is not None and saved.folder.is_dir():
        sys.path.insert(0, str(saved.folder))
    return saved
