"""Sessions kept on the disk, so that a lost connection loses nothing, and the models that were open last.

One JSON file for each run of the app, in the state folder of the user (`$XDG_STATE_HOME/dtype-tui/sessions`), readable by
nobody else. What trusts a model to run code is not kept: it has to be said again.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import stat
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dtype_engine.checkpoint.source import is_python
from dtype_engine.core.atomic_write import write_text_atomic
from dtype_engine.core.errors import UserError
from dtype_engine.core.options import Options, RunSettings
from dtype_engine.core.regular_files import read_regular
from dtype_engine.core.text import printable
from dtype_engine.recipe import Recipe, Rule
from dtype_engine.recipe.plan import MATCHING_S
from dtype_engine.recipe.regexes import time_limit
from dtype_tui.state.measurement_log import MeasuredRecipe

VERSION = 1
MOST_KEPT = 40
MOST_STEPS = 200
"""Recipes kept on either side of the one in force: how far undo and redo reach in a session that is taken up."""
NOT_KEPT = frozenset({"trust_pickle", "trust_remote_code", "download"})
"""Options that let code run or fetch it: a file must not say so for the user."""
_LARGEST = 64 << 20


@dataclass(frozen=True, slots=True)
class SavedSession:
    """One session as it was last.

    model: what to open it by, None for the demo. path: the files behind it, where there are some. folder: where the program
    was started. recipes: those gone through, the one in force at place `at`. cursor: the node it stood on. measured: the
    history of what was measured.
    """

    model: str | None
    title: str
    path: Path | None = None
    folder: Path | None = None
    options: Options = field(default_factory=Options)
    recipes: tuple[Recipe, ...] = (Recipe(),)
    at: int = 0
    cursor: str = ""
    measured: tuple[MeasuredRecipe, ...] = ()
    saved: datetime = field(default_factory=lambda: datetime.now(UTC))
    own: bool = True
    """Whether nobody but the user and this program can have written it: only then may it name Python code to run."""

    @property
    def recipe(self) -> Recipe:
        """The one in force."""
        return self.recipes[self.at]

    @property
    def valid_measurements(self) -> tuple[MeasuredRecipe, ...]:
        """What was measured, if nothing that belongs to the model was written since; nothing where that can't be told."""
        if self.path is None:
            return ()
        try:
            files = [self.path, *self.path.iterdir()] if self.path.is_dir() else [self.path]
            newest = max(file.stat().st_mtime for file in files)
        except OSError:
            return ()
        return self.measured if newest <= self.saved.timestamp() else ()


@dataclass(frozen=True, slots=True)
class RecentModel:
    """A model that was open: its title, what to open it by (None for the demo), its files, and when (UTC)."""

    name: str
    model: str | None
    path: Path | None
    time: datetime


def recent_models(most: int = 10) -> tuple[RecentModel, ...]:
    """The models that were open last, the newest first, each once. Files that can't be read are passed over."""
    found: dict[str | None, RecentModel] = {}
    for saved in _readable():
        if not saved.own and is_python(saved.model):
            continue
        found.setdefault(saved.model, RecentModel(saved.title, saved.model, saved.path, saved.saved))
        if len(found) == most:
            break
    return tuple(found.values())


def newest_session(model: str | None = None, any_model: bool = True) -> SavedSession:
    """The session saved last: of any model, or of `model` alone (as on the command line, None the demo).

    Raises UserError where there is none, or where the newest of all can't be read.
    """
    files = _files()
    if any_model:
        if not files:
            raise UserError(f"there is no session to take up in {sessions_folder()}: open a model first")
        return read_session(files[0])
    wanted = canonical_model_ref(model)
    for saved in _readable():
        if saved.model == wanted:
            return saved
    raise UserError(
        f"there is no session of {printable(model or 'the demo', 200)} to take up; open it without --resume"
    )


def sessions_folder() -> Path:
    """Where sessions are kept."""
    import platformdirs

    return platformdirs.user_state_path("dtype-tui") / "sessions"


def canonical_model_ref(model: str | None) -> str | None:
    """What opens the same model from any folder: paths made absolute, everything else as it is."""
    if model is None or (model == "demo" and not Path(model).exists()):
        return None
    try:
        if Path(model).expanduser().exists():
            return str(Path(model).expanduser().resolve())
    except (OSError, RuntimeError):  # too long for a name, or the home of nobody
        return model
    before, colon, attribute = model.rpartition(":")
    if colon and before.endswith(".py"):
        return f"{Path(before).expanduser().resolve()}:{attribute}"
    return model


class SessionFile:
    """The file of one running program. Written anew, whole, at every `save`; the oldest of all sessions go."""

    def __init__(self) -> None:
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        self.path = sessions_folder() / f"{stamp}-{secrets.token_hex(4)}.json"
        self._pruned = False

    def save(self, session: SavedSession) -> None:
        """Raises UserError when it can't be written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise UserError(f"can't keep the session in {self.path.parent}: {error.strerror}") from None
        write_text_atomic(
            self.path, json.dumps(_encoded(session), ensure_ascii=False, indent=1), replace=True, mode=0o600
        )
        if not self._pruned:
            self._pruned = True
            prune()


def prune(most: int = MOST_KEPT) -> None:
    """Remove the oldest sessions, and pieces of files whose writer was killed a day or longer ago."""
    for path in _files()[most:]:
        path.unlink(missing_ok=True)
    yesterday = datetime.now(UTC).timestamp() - 86400
    for path in sessions_folder().glob(".*.partial-*"):
        try:
            if path.stat().st_mtime < yesterday:
                path.unlink()
        except OSError:
            continue


def read_session(path: Path) -> SavedSession:
    """Raises UserError that names the file and says what is wrong with it."""
    try:
        own = is_own(path)
        data: Any = json.loads(read_regular(path, _LARGEST))
    except OSError as error:
        raise UserError(f"can't read the session {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UserError(
            f"the session {path} can't be read: it is damaged; remove it, or open the model itself"
        ) from None
    if not isinstance(data, dict) or "version" not in data:
        raise UserError(f"{path} is not a session of dtype-tui; remove it, or open the model itself")
    if data["version"] != VERSION:
        raise UserError(
            f"the session {path} is of version {printable(str(data['version']))}, and this program reads version {VERSION}; "
            "open the model itself"
        )
    try:
        with time_limit(MATCHING_S):
            return dataclasses.replace(_decoded(data), own=own)
    except (UserError, KeyError, TypeError, ValueError, OverflowError, AttributeError, RecursionError) as error:
        reason = f"no entry {error}" if isinstance(error, KeyError) else str(error)
        raise UserError(
            f"the session {path} can't be read: {printable(reason, 200)}; remove it, or open the model itself"
        ) from None


def is_own(path: Path) -> bool:
    """Whether a file is as this program writes a session: a plain file of the user's, which no one else may read or write,
    in a folder that no one else may write to.
    """
    file, folder = path.lstat(), path.parent.stat()
    return (
        stat.S_ISREG(file.st_mode)
        and file.st_uid == folder.st_uid == os.geteuid()
        and not file.st_mode & 0o077
        and not folder.st_mode & 0o022
    )


def _files() -> list[Path]:
    """Session files, the one written last first."""
    return sorted(sessions_folder().glob("*.json"), key=_written, reverse=True)


def _written(path: Path) -> tuple[int, str]:
    try:
        return path.stat().st_mtime_ns, path.name
    except OSError:  # another program's pruning was faster
        return 0, path.name


def _readable() -> Iterator[SavedSession]:
    for path in _files():
        try:
            yield read_session(path)
        except UserError:
            continue


def _encoded(session: SavedSession) -> dict[str, Any]:
    first = max(0, session.at - MOST_STEPS)
    kept = session.recipes[first : session.at + MOST_STEPS + 1]
    return {
        "version": VERSION,
        "model": session.model,
        "title": session.title,
        "path": _plain(session.path),
        "folder": _plain(session.folder),
        "saved": session.saved.isoformat(),
        "options": {
            option.name: _plain(getattr(session.options, option.name))
            for option in dataclasses.fields(Options)
            if option.name not in NOT_KEPT and option.name != "settings"
        },
        "settings": {name: _plain(value) for name, value in dataclasses.asdict(session.options.settings).items()},
        "recipes": [[str(rule) for rule in recipe.rules] for recipe in kept],
        "at": session.at - first,
        "cursor": session.cursor,
        "measured": [
            {name: _plain(value) for name, value in dataclasses.asdict(entry).items()} for entry in session.measured
        ],
    }


def _decoded(data: Mapping[str, Any]) -> SavedSession:
    settings = RunSettings(**_checked(RunSettings, data["settings"]))
    options = Options(**_checked(Options, data["options"]), settings=settings)
    recipes = tuple(Recipe(tuple(Rule.parse(_of(str, rule)) for rule in rules)) for rules in _of(list, data["recipes"]))
    at = _of(int, data["at"])
    if not 0 <= at < len(recipes):
        raise ValueError(f"there is no recipe {at}")
    return SavedSession(
        model=_of((str, type(None)), data["model"]),
        title=_of(str, data["title"]),
        path=_path(data["path"]),
        folder=_path(data["folder"]),
        options=options,
        recipes=recipes,
        at=at,
        cursor=_of(str, data["cursor"]),
        measured=tuple(_measured(row) for row in _of(list, data["measured"])),
        saved=_time(_of(str, data["saved"])),
    )


def _measured(row: Any) -> MeasuredRecipe:
    entry = MeasuredRecipe(**_checked(MeasuredRecipe, row))
    _ = entry.recipe  # rules that can't be read are refused here, and not when somebody goes back to them
    return entry


def _time(text: str) -> datetime:
    time = datetime.fromisoformat(text)
    if time.tzinfo is None:
        raise ValueError(f"{printable(text)} says no time zone")
    return time


def _of(kind: type | tuple[type, ...], value: Any) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise ValueError(f"{printable(repr(value))} is not what belongs there")
    return value


def _path(value: Any) -> Path | None:
    return None if value is None else Path(_of(str, value))


def _plain(value: Any) -> Any:
    """An option as JSON: paths absolute, since the session may be taken up in another folder."""
    if isinstance(value, Path):
        return str(value.expanduser().absolute())
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise TypeError(f"{type(value).__name__} has no place in a session file")


def _checked(kind: type, entry: Any) -> dict[str, Any]:
    """The fields of an options class out of JSON, each of the type that the class declares; unknown ones are refused."""
    hints = typing.get_type_hints(kind)
    found = {}
    for name, value in _of(dict, entry).items():
        if name not in hints or name in NOT_KEPT:
            raise ValueError(f"unknown option {name}")
        found[name] = _as_declared(name, value, hints[name])
    return found


def _as_declared(name: str, value: Any, hint: Any) -> Any:
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for choice in inside:
            try:
                return _as_declared(name, value, choice)
            except ValueError:
                continue
    elif origin is typing.Literal:
        if value in inside:
            return value
    elif origin is tuple:
        if isinstance(value, list):
            return tuple(_as_declared(name, item, inside[0]) for item in value)
    elif hint is Path:
        if isinstance(value, str):
            return Path(value)
    elif hint in (type(None), None):
        if value is None:
            return None
    elif isinstance(hint, type) and isinstance(value, hint) and not (isinstance(value, bool) and hint is int):
        return value
    raise ValueError(f"option {name} can't be {printable(repr(value))}")
