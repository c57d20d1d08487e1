"""Stores sessions on disk, so that a lost connection loses no work. Also lists the recently opened models.

Each run of the app has one JSON file in the user's state folder (`$XDG_STATE_HOME/dtype-tui/sessions`), which only the user can
read. Options that let a model run code are not saved.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec

from dtype_engine.checkpoint.source import is_python
from dtype_engine.core.atomic_write import write_text_atomic
from dtype_engine.core.errors import UserError
from dtype_engine.core.kv_formats import parse_scanned
from dtype_engine.core.number_ranges import LARGEST_COUNT, Amount, Count, Positive
from dtype_engine.core.options import Options, RunSettings
from dtype_engine.core.regexes import time_limit
from dtype_engine.core.regular_files import read_regular
from dtype_engine.core.text import printable
from dtype_engine.core.typed_data import as_plain, as_type, refuse_unknown
from dtype_engine.core.user_folders import expanded, state_folder
from dtype_engine.recipe import Recipe, Rule
from dtype_engine.recipe.plan import MATCHING_S
from dtype_engine.results.drift import Extent, OutputDrift
from dtype_engine.results.metrics import MetricChange
from dtype_tui.state.addresses import is_address
from dtype_tui.state.measurement_log import MeasuredRecipe
from dtype_tui.state.rule_list import ListedRule, RuleList

VERSION = 2
MOST_KEPT = 40
MOST_STEPS = 200
"""Maximum number of undo steps, and likewise of redo steps, that are saved for a resumed session."""
NOT_KEPT = frozenset({"trust_pickle", "trust_remote_code", "download", "read_only", "metrics", "data"})
"""Options that sessions do not save, because a file must not decide what code may run or be downloaded, or what viewers may do."""
_OPTIONS = [option.name for option in dataclasses.fields(Options) if option.name not in {*NOT_KEPT, "settings"}]
_SETTINGS = [setting.name for setting in dataclasses.fields(RunSettings)]
_LARGEST = 64 << 20


@dataclass(frozen=True, slots=True)
class SavedSession:
    """The state of a session when it was last saved."""

    model: str | None
    """MODEL, in a form that names the model from any folder. None for the demo."""
    title: str
    path: Path | None = None
    """The model's files, or None if it has none on this machine."""
    folder: Path | None = None
    """The folder in which the program was started."""
    options: Options = field(default_factory=Options)
    rule_lists: tuple[RuleList, ...] = (RuleList(),)
    """The rules of each step of the session's history, oldest first."""
    at: int = 0
    """Index in `rule_lists` of the current rules."""
    cursor: str = ""
    measured: tuple[MeasuredRecipe, ...] = ()
    scanned: tuple[str, ...] = ()
    """The dtypes of the last scan, finished or not. Empty if there was none."""
    context: int | None = None
    """The tokens of a sequence for which the bytes of KV caches were shown, or None for the default."""
    batch: int = 1
    budget: int | None = None
    """The bytes into which the served model was to fit, or None."""
    saved: datetime = field(default_factory=lambda: datetime.now(UTC))
    own: bool = True
    """Whether only this user can have written the file. If False, no Python code that it names is run."""

    @property
    def recipe(self) -> Recipe:
        return self.rule_lists[self.at].recipe

    @property
    def valid_measurements(self) -> tuple[MeasuredRecipe, ...]:
        """The saved measurements, or () if the model's files may have changed since the session was saved."""
        if self.path is None or self.saved > datetime.now(UTC):
            return ()
        try:
            files = [self.path, *self.path.iterdir()] if self.path.is_dir() else [self.path]
            newest = max(file.stat().st_mtime for file in files)
        except OSError:
            return ()
        return self.measured if newest <= self.saved.timestamp() else ()


def recent_models() -> tuple[SavedSession, ...]:
    """Return the last session of each model, newest first. Skips unreadable files, and files by others that name Python code."""
    models: dict[str | None, SavedSession] = {}
    for saved in _readable():
        if saved.own or not is_python(saved.model):
            models.setdefault(saved.model, saved)
    return tuple(models.values())


def newest_session(model: str | None = None) -> SavedSession:
    """Return the newest session, of `model` or, if None, of any model. Raises UserError if there is none or it can't be read."""
    if model is None:
        files = _files()
        if not files:
            raise UserError(f"there is no session to resume in {sessions_folder()}: open a model first")
        return read_session(files[0])
    wanted = canonical_model_ref(model)
    for saved in _readable():
        if saved.model == wanted:
            return saved
    raise UserError(f"there is no session of {printable(model, 200)} to resume; open it without --resume")


def sessions_folder() -> Path:
    return state_folder() / "sessions"


def canonical_model_ref(model: str | None) -> str | None:
    """Return MODEL in a form that means the same in any folder: paths become absolute, and the demo becomes None."""
    if model is None or (model == "demo" and not Path(model).exists()):
        return None
    if is_address(model):
        return model
    try:
        if expanded(model).exists():
            return str(expanded(model).resolve())
    except (OSError, RuntimeError, ValueError):  # too long a name, a loop of links, or a null byte
        return model
    before, colon, attribute = model.rpartition(":")
    if colon and before.endswith(".py"):
        return f"{expanded(before).resolve()}:{attribute}"
    return model


class SessionFile:
    """Writes the session file of this run of the app. The first `save` also deletes the oldest sessions' files."""

    def __init__(self) -> None:
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        self.path = sessions_folder() / f"{stamp}-{secrets.token_hex(4)}.json"
        self._pruned = False

    def save(self, session: SavedSession) -> None:
        """Write the session to its file. Raises UserError if the file can't be written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise UserError(f"can't keep the session in {self.path.parent}: {error.strerror}") from None
        # In ASCII, because a path that is not UTF-8 has halves of surrogate pairs, which can't be encoded.
        write_text_atomic(self.path, json.dumps(_encoded(session), indent=1), replace=True, mode=0o600)
        if not self._pruned:
            self._pruned = True
            prune()


def prune() -> None:
    """Delete the oldest sessions, and partial files more than a day old, which killed processes have left behind."""
    for path in _files()[MOST_KEPT:]:
        with contextlib.suppress(OSError):  # another run of the app has deleted it, or it is not a file
            path.unlink()
    yesterday = datetime.now(UTC).timestamp() - 86400
    for path in sessions_folder().glob(".*.partial-*"):
        try:
            if path.stat().st_mtime < yesterday:
                path.unlink()
        except OSError:
            continue


def read_session(path: Path) -> SavedSession:
    """Return the session in a file. Raises UserError, which names the file and the problem."""
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
    except UserError as error:
        raise UserError(
            f"the session {path} can't be read: {printable(str(error), 200)}; remove it, or open the model itself"
        ) from None


def is_own(path: Path) -> bool:
    """Return whether only this user can have written a file: no one else may read or write it, or write to its folder."""
    file, folder = path.lstat(), path.parent.stat()
    return (
        stat.S_ISREG(file.st_mode)
        and file.st_uid == folder.st_uid == os.geteuid()
        and not file.st_mode & 0o077
        and not folder.st_mode & 0o022
    )


def _files() -> list[Path]:
    """Return all session files, the most recently saved first."""
    return sorted(sessions_folder().glob("*.json"), key=_written, reverse=True)


def _written(path: Path) -> tuple[int, str]:
    try:
        return path.stat().st_mtime_ns, path.name
    except OSError:  # another run of the app has just deleted it
        return 0, path.name


def _readable() -> Iterator[SavedSession]:
    for path in _files():
        try:
            yield read_session(path)
        except UserError:
            continue


class _Measurement(msgspec.Struct, kw_only=True):
    """A `MeasuredRecipe` as a session file stores it."""

    rules: list[str]
    settings: RunSettings
    inputs: str
    planned_bytes: Count
    output: OutputDrift
    """In the file, its figures are keyed by name (`OutputDrift.by_name`), beside `groups`."""
    extent: Extent
    seconds: Amount | None
    overflowed: Count | None
    vanished: Count | None
    pinned: bool
    metrics: tuple[MetricChange, ...] = ()
    """Missing in files of older versions."""


class _File(msgspec.Struct):
    """The content of a session file, except its version. Unknown entries are ignored."""

    model: str | None
    title: str
    path: Path | None
    folder: Path | None
    saved: Annotated[datetime, msgspec.Meta(tz=True)]
    options: Options
    settings: RunSettings
    recipes: list[list[str]]
    """The enabled rules of each step of the history."""
    at: int
    cursor: str
    measured: list[_Measurement]
    scanned: tuple[str, ...] = ()
    disabled: list[list[tuple[Count, str]]] = []
    """The disabled rules of each step: (index among all rules of the step, rule). Empty in files of older versions."""
    context: Positive | None = None
    batch: Positive = 1
    budget: Positive | None = None


_ALIKE = ("model", "title", "path", "folder", "saved", "options", "cursor", "context", "batch")
"""The fields that are the same in a `SavedSession` and in a `_File`."""


def _encoded(session: SavedSession) -> dict[str, Any]:
    first = max(0, session.at - MOST_STEPS)
    kept = session.rule_lists[first : session.at + MOST_STEPS + 1]
    options = as_plain(session.options)
    file = _File(
        **{name: getattr(session, name) for name in _ALIKE},
        settings=session.options.settings,
        recipes=[list(map(str, rules.recipe.rules)) for rules in kept],
        disabled=[[(at, str(row.rule)) for at, row in enumerate(rules.rows) if not row.enabled] for rules in kept],
        at=session.at - first,
        measured=[_measurement(each) for each in session.measured],
        scanned=session.scanned,
        budget=None if session.budget is None else min(session.budget, LARGEST_COUNT),
    )
    plain = as_plain(file)
    for entry, each in zip(plain["measured"], session.measured, strict=True):
        entry["output"] = {**each.output.by_name(), "groups": entry["output"]["groups"]}
    return {
        "version": VERSION,
        **plain,
        "saved": session.saved.isoformat(),
        "options": {name: options[name] for name in _OPTIONS},
    }


def _decoded(data: Mapping[str, Any]) -> SavedSession:
    if isinstance(data.get("measured"), list):
        data = {**data, "measured": [_in_fields(entry) for entry in data["measured"]]}
    file = as_type(data, _File)
    refuse_unknown("option", data["options"], _OPTIONS)
    refuse_unknown("setting", data["settings"], _SETTINGS)
    for entry in data["measured"]:
        refuse_unknown("figure", entry, _Measurement.__struct_fields__)
    _refuse_options(file.options)
    if len(file.recipes) > 2 * MOST_STEPS + 1:
        raise UserError(f"it has {len(file.recipes):,} recipes, and a session keeps {2 * MOST_STEPS + 1}")
    if not 0 <= file.at < len(file.recipes):
        raise UserError(f"there is no recipe {file.at}")
    if len(file.disabled) not in (0, len(file.recipes)):
        raise UserError(f"there are {len(file.recipes)} recipes, and disabled rules of {len(file.disabled)}")
    rule_lists = tuple(map(_rule_list, file.recipes, file.disabled or [[] for _ in file.recipes]))
    return SavedSession(
        **{name: getattr(file, name) for name in (*_ALIKE, "at", "budget")}
        | {"options": dataclasses.replace(file.options, settings=file.settings)},
        rule_lists=rule_lists,
        measured=tuple(map(_measured_recipe, file.measured)),
        scanned=tuple(map(parse_scanned, file.scanned)),
    )


def _in_fields(entry: Any) -> Any:
    """Return a measurement of a session file with its figures, which the file lists by name, in the fields of an `OutputDrift`."""
    has_figures = isinstance(entry, dict) and isinstance(entry.get("output"), dict)
    return entry | {"output": OutputDrift.fields_of(entry["output"])} if has_figures else entry


def _refuse_options(options: Options) -> None:
    """Raise UserError for an option that a file may not have, though its type allows it."""
    if isinstance(options.workers, str) and not options.workers.startswith(("tcp://", "tls://")):
        raise UserError(f"workers: {options.workers} is no address")
    if is_python(options.reference_model):
        raise UserError("reference: Python code is named on the command line")


def _rule_list(enabled: list[str], disabled: list[tuple[int, str]]) -> RuleList:
    """Return a `RuleList`. disabled: pairs (index among all rules, rule). Raises UserError for a rule that can't be parsed."""
    rows = list(RuleList.of(map(Rule.parse, enabled)).rows)
    for place, rule in disabled:
        rows.insert(place, ListedRule(Rule.parse(rule), enabled=False))
    return RuleList(tuple(rows))


def _measurement(entry: MeasuredRecipe) -> _Measurement:
    fields = msgspec.structs.asdict(entry)
    return _Measurement(rules=list(map(str, fields.pop("recipe").rules)), **fields)


def _measured_recipe(entry: _Measurement) -> MeasuredRecipe:
    fields = msgspec.structs.asdict(entry)
    return MeasuredRecipe(recipe=Recipe.of(map(Rule.parse, fields.pop("rules"))), **fields)
