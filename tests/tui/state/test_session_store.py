"""Sessions come back as they were saved, whatever else lies in their folder."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.helpers.recording_engine import report

from dtype_engine import Options, Recipe, Rule, RunSettings
from dtype_engine.checkpoint.source import locate
from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.core.typed_data import as_plain
from dtype_tui.state import session_store as sessions
from dtype_tui.state.measurement_log import measured
from dtype_tui.state.rule_list import RuleList
from dtype_tui.state.session_store import (
    MOST_STEPS,
    SavedSession,
    SessionFile,
    newest_session,
    prune,
    read_session,
    recent_models,
    sessions_folder,
)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert sessions_folder() == tmp_path / "state" / "dtype-tui" / "sessions"
    return sessions_folder()


def save(at: float, *saved: SavedSession) -> list[Path]:
    """Save sessions as if that many seconds after 1970."""
    paths = []
    for place, session in enumerate(saved):
        file = SessionFile()
        file._pruned = True
        file.save(session)
        os.utime(file.path, (at + place, at + place))
        paths.append(file.path)
    return paths


def recipe(*casts: str) -> Recipe:
    return Recipe(tuple(map(Rule.parse, casts)))


BF16 = recipe("*=bf16")
EXACT = dataclasses.replace(report(BF16).output, sqnr_db=math.inf, kl_mean=None)
AUTOCAST = RunSettings(autocast="bfloat16")
MEASURED = measured(report(BF16), BF16, RunSettings(), 1_415_616)


ENTRY: dict[str, Any] = {"rules": ["*=bfloat16"]} | {
    name: as_plain(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
    for name, value in msgspec.structs.asdict(MEASURED).items()
    if name not in ("recipe", "output")
}
ENTRY["output"] = MEASURED.output.by_name()


def test_measurements_of_a_saved_session_are_valid_until_model_files_change(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    session = SavedSession("here", "here", tmp_path, measured=(MEASURED,))
    assert session.valid_measurements == (MEASURED,)
    later = session.saved.timestamp() + 10
    os.utime(tmp_path / "model.safetensors", (later, later))
    assert session.valid_measurements == ()
    assert dataclasses.replace(session, path=None).valid_measurements == ()
    assert dataclasses.replace(session, path=tmp_path / "gone").valid_measurements == ()


def test_complete_session_is_unchanged_by_saving_and_reading(tmp_path: Path) -> None:
    session = SavedSession(
        model="org/name",
        title="org/name",
        path=tmp_path,
        folder=tmp_path,
        options=Options(
            device="cpu", prompts=("one\n\u202e", "two"), texts=(tmp_path / "a.txt",), weights=tmp_path / "w.pth",
            reference_bytes=17, threads=2, settings=RunSettings("bfloat16", "float16", "model", "weights"),
        ),
        rule_lists=(
            RuleList(),
            RuleList.of(recipe("*=bf16").rules),
            RuleList.of(recipe("*=bf16", "re:a=b=fp8@tensor", "x.{0..3}=stored").rules).toggled(1).toggled(2),
        ),
        at=1,
        cursor="model.layers.0",
        context=4096,
        batch=3,
        budget=24 << 30,
        measured=(
            MEASURED,
            msgspec.structs.replace(MEASURED, recipe=Recipe(), output=EXACT, seconds=None, settings=AUTOCAST, pinned=True),
        ),
    )  # fmt: skip
    (path,) = save(0, session)
    assert read_session(path) == session
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.slow
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.lists(
        st.lists(
            st.builds(
                Rule,
                st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1),
                st.sampled_from(dtypes.CASTABLE_DTYPES),
            ),
            max_size=4,
        ),
        min_size=1, max_size=5,
    ),
    st.data(),
)  # fmt: skip
def test_recipes_of_a_session_are_unchanged_by_saving_and_reading(recipes: list[list[Rule]], data: Any) -> None:
    made = []
    for rules in recipes:
        try:
            made.append(RuleList.of(Rule.make(rule.pattern, rule.dtype) for rule in rules))
        except UserError:
            return
    for index, rules_made in enumerate(made):
        for row in data.draw(st.sets(st.integers(0, max(0, len(rules_made.rows) - 1)))) if rules_made.rows else ():
            made[index] = made[index].toggled(row)
    at = data.draw(st.integers(0, len(made) - 1))
    (path,) = save(0, SavedSession(None, "demo", rule_lists=tuple(made), at=at))
    found = read_session(path)
    assert (found.rule_lists, found.at) == (tuple(made), at)


def test_session_saves_every_option_except_those_that_grant_trust() -> None:
    options = Options(trust_pickle=True, trust_remote_code=True, download=True)
    (path,) = save(0, SavedSession(None, "demo", options=options))
    written = json.loads(path.read_text())["options"]
    assert set(written) == {f.name for f in dataclasses.fields(Options)} - sessions.NOT_KEPT - {"settings"}
    assert read_session(path).options == Options()


@pytest.mark.parametrize("name", sorted(sessions.NOT_KEPT))
def test_session_file_with_options_that_grant_trust_is_refused(name: str) -> None:
    (path,) = save(0, SavedSession(None, "demo"))
    data = json.loads(path.read_text())
    data["options"][name] = {"metrics": ["marks.py:accuracy"], "data": ["texts.jsonl"]}.get(name, True)
    path.write_text(json.dumps(data))
    with pytest.raises(UserError, match=f"unknown option {name}"):
        read_session(path)


def test_session_saves_the_undo_steps_nearest_to_the_current_one() -> None:
    rules = tuple(RuleList.of(recipe(f"layer.{number}=bf16").rules) for number in range(3 * MOST_STEPS))
    (path,) = save(0, SavedSession(None, "demo", rule_lists=rules, at=MOST_STEPS + 50))
    found = read_session(path)
    assert found.recipe == rules[MOST_STEPS + 50].recipe
    assert found.at == MOST_STEPS
    assert found.rule_lists == rules[50 : 2 * MOST_STEPS + 51]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: "{", "damaged"),
        (lambda data: "[" * 100_000, "damaged"),
        (lambda data: b"\xff\xfe\x00", "damaged"),
        (lambda data: "", "damaged"),
        (lambda data: "3", "is not a session"),
        (lambda data: '{"a": 1}', "is not a session"),
        (lambda data: data | {"version": 1}, "version 1"),
        (lambda data: data | {"version": "\x1b[2J"}, r"version \\x1b"),
        (lambda data: data | {"at": 1}, "no recipe 1"),
        (lambda data: data | {"at": -1}, "no recipe -1"),
        (lambda data: data | {"at": True}, "at: expected int, got bool"),
        (lambda data: data | {"model": 3}, r"model: expected str \| null, got int"),
        (lambda data: data | {"recipes": [["*=foo"]]}, "unknown dtype"),
        (lambda data: data | {"recipes": [[3]]}, r"recipes\[0\]\[0\]: expected str, got int"),
        (lambda data: data | {"recipes": 3}, "recipes: expected array, got int"),
        (lambda data: data | {"saved": "yesterday"}, "saved: invalid"),
        (lambda data: data | {"options": {"device": 3}}, "options.device: expected str"),
        (lambda data: data | {"options": {"prompts": ["a", 3]}}, r"options.prompts\[1\]: expected str"),
        (lambda data: data | {"options": {"threads": True}}, "options.threads: expected int"),
        (lambda data: data | {"options": {"bogus": 3}}, "unknown option bogus"),
        (lambda data: data | {"settings": {"autocast": "int8"}}, "settings.autocast: invalid enum value 'int8'"),
        (lambda data: data | {"settings": {"bogus": 3}}, "unknown setting bogus"),
        (lambda data: data | {"path": 3}, "path: expected a path, got int"),
        (lambda data: {name: value for name, value in data.items() if name != "cursor"}, "missing required field cursor"),
        (lambda data: data | {"measured": [1]}, r"measured\[0\]: expected object, got int"),
        (lambda data: data | {"measured": [ENTRY | {"kl": 1.0}]}, "unknown figure kl"),
        (lambda data: data | {"measured": [ENTRY | {"rules": ["*=foo"]}]}, "unknown dtype"),
        (
            lambda data: data | {"measured": [ENTRY | {"output": ENTRY["output"] | {"sqnr_db": "high"}}]},
            r"measured\[0\].output.sqnr_db: expected float \| null, got str",
        ),
    ],
)  # fmt: skip
def test_damaged_session_is_refused_in_one_sentence(change: Any, says: str) -> None:
    old, new = save(0, SavedSession("one", "one"), SavedSession("two", "two"))
    changed = change(json.loads(new.read_text()))
    new.write_bytes(changed if isinstance(changed, bytes) else (
        changed if isinstance(changed, str) else json.dumps(changed)).encode()
    )  # fmt: skip
    os.utime(new, (10, 10))
    with pytest.raises(UserError, match=says) as caught:
        newest_session()
    assert str(new) in str(caught.value)
    assert "\x1b" not in str(caught.value)
    assert [recent.title for recent in recent_models()] == ["one"]
    assert newest_session("one") == read_session(old)


def test_models_of_saved_sessions_are_listed_once_newest_first(tmp_path: Path) -> None:
    assert recent_models() == ()
    save(0, *(SavedSession(name, f"title of {name}", tmp_path) for name in ("a", "b", "a", "c", "b")))
    save(100, SavedSession(None, "demo"))
    assert [recent.title for recent in recent_models()] == ["demo", "title of b", "title of c", "title of a"]
    assert recent_models()[0].model is None
    assert recent_models()[1].path == tmp_path


def test_newest_session_is_found_with_and_without_the_name_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="no session to resume"):
        newest_session()
    model = tmp_path / "model"
    model.mkdir()
    save(0, SavedSession(sessions.canonical_model_ref(str(model)), "first", cursor="a"))
    save(10, SavedSession(sessions.canonical_model_ref(str(model)), "second", cursor="b"), SavedSession(None, "demo"))
    assert newest_session().title == "demo"
    monkeypatch.chdir(tmp_path)
    assert newest_session("model").title == "second"
    assert newest_session("demo").title == "demo"
    with pytest.raises(UserError, match="no session of other"):
        newest_session("other")


def test_model_path_of_a_session_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "net.py").write_text("x = 1\n")
    monkeypatch.chdir(tmp_path)
    assert sessions.canonical_model_ref("net.py:x") == f"{tmp_path / 'net.py'}:x"
    assert sessions.canonical_model_ref("net.py") == str(tmp_path / "net.py")
    assert sessions.canonical_model_ref("org/name") == "org/name"
    assert sessions.canonical_model_ref("package.module:Net") == "package.module:Net"
    assert sessions.canonical_model_ref(None) is None


def test_oldest_sessions_and_stale_temporary_files_are_removed(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MOST_KEPT", 3)
    save(0, *(SavedSession(str(number), str(number)) for number in range(7)))
    stale, fresh = state / ".x.json.partial-1", state / ".x.json.partial-2"
    stale.touch()
    os.utime(stale, (5, 5))
    fresh.touch()
    prune()
    assert [recent.title for recent in recent_models()] == ["6", "5", "4"]
    assert (stale.exists(), fresh.exists()) == (False, True)


def test_unwritable_session_folder_is_reported_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match="can't keep the session"):
        SessionFile().save(SavedSession(None, "demo"))


def planted(model: str, folder: Path, mode: int) -> None:
    """Write a session of a Python model as another user would: with other permissions than the app gives its own files."""
    (path,) = save(9_000_000_000, SavedSession(model, "gpt2", None, folder))
    path.chmod(mode)


@pytest.mark.parametrize("mode", [0o644, 0o606, 0o660])
def test_session_file_writable_by_others_cannot_name_code_to_run(tmp_path: Path, mode: int) -> None:
    from dtype_tui.cli.resume import saved_session

    (tmp_path / "planted_again.py").write_text("raise SystemExit('ran')")
    before = list(sys.path)
    planted("planted_again:Net", tmp_path, mode)
    assert recent_models() == ()
    with pytest.raises(UserError, match="someone else could have written it"):
        saved_session(None)
    assert saved_session("planted_again:Net").model == "planted_again:Net"  # named by the user
    assert sys.path == before


def test_session_writable_only_by_the_user_can_name_python_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dtype_tui.cli.resume import saved_session

    monkeypatch.setattr(sys, "path", list(sys.path))
    planted("planted_again:Net", tmp_path, 0o600)
    assert saved_session(None).model == "planted_again:Net"
    assert sys.path[0] == str(tmp_path)
    assert [recent.model for recent in recent_models()] == ["planted_again:Net"]


def test_session_in_a_folder_writable_by_others_is_not_trusted(tmp_path: Path) -> None:
    planted("planted_again:Net", tmp_path, 0o600)
    sessions_folder().chmod(0o777)
    assert not newest_session().own
    sessions_folder().chmod(0o700)
    assert newest_session().own


def test_session_of_a_hub_model_adds_no_folder_to_the_import_path(tmp_path: Path) -> None:
    from dtype_tui.cli.resume import saved_session

    before = list(sys.path)
    planted("org/name", tmp_path, 0o600)
    assert saved_session(None).model == "org/name"
    assert sys.path == before


@pytest.mark.parametrize("model", ["x" * 100_000, "~nobody-of-this-name/x", "a\0b:Net", "\ud800"])
def test_impossible_model_path_in_a_session_is_refused(model: str, tmp_path: Path) -> None:
    (path,) = save(9_000_000_000, SavedSession("here", "here"))
    data = json.loads(path.read_text()) | {"model": model}
    path.write_text(json.dumps(data))
    assert newest_session().model == model
    with pytest.raises(UserError):
        locate(model)
    assert isinstance(sessions.canonical_model_ref(model), str)


@pytest.mark.parametrize("time", ["0001-01-01T00:00:00", "2026-01-01", "9999-99-99"])
def test_session_with_an_invalid_time_is_refused(time: str) -> None:
    (path,) = save(9_000_000_000, SavedSession("here", "here"))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"saved": time}))
    with pytest.raises(UserError, match="can't be read"):
        read_session(path)
