"""What may happen to the app besides an engine that means harm. The table of `tests/README.md` has it, with
`test_further_attacks.py` of the engine.
"""

from __future__ import annotations

import dataclasses
import json
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.engine.hostile.test_further_attacks import full_disk
from tests.helpers.recording_engine import demo_tree, engine, launched, make_app, report, running, say
from tests.helpers.screen_text import screen, until
from textual.pilot import Pilot

from dtype_engine.checkpoint.source import DEMO
from dtype_engine.core.errors import UserError
from dtype_engine.core.options import Options, RunSettings
from dtype_engine.recipe import Recipe, Rule
from dtype_engine.service import events
from dtype_tui.app import DtypeApp
from dtype_tui.cli.resume import saved_session
from dtype_tui.state.measurement_log import measured
from dtype_tui.state.rule_list import RuleList
from dtype_tui.state.session_saver import SessionSaver
from dtype_tui.state.session_store import SavedSession, SessionFile, read_session, recent_models, sessions_folder

MLP = Recipe((Rule("*.mlp", "float16"),))
BF16 = Recipe((Rule("*", "bfloat16"),))
MEASURED = measured(report(MLP), MLP, RunSettings(), 1_934_208)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def saver() -> SessionSaver:
    return SessionSaver(None, "demo", None, Options(device="cpu"))


async def cast(app: DtypeApp, pilot: Pilot[None], recipe: Recipe) -> None:
    tree = app.controller.experiment.tree
    await say(app, pilot, events.ModelReady(tree, "Net", "cpu", 1.0, "prompts", ()), events.Idle())
    app.controller.apply_recipe(recipe)
    app._save_session()
    await pilot.pause()


# -- the session's file ------------------------------------------------------------------------------------------------


def edited(**changes: Any) -> Path:
    """Save a session and change entries of its file. A name that is no entry is taken as an option."""
    file = SessionFile()
    file.save(SavedSession(None, "demo", Path(DEMO), measured=(MEASURED,)))
    data = json.loads(file.path.read_text())
    for name, value in changes.items():
        (data if name in data else data["options"])[name] = value
    file.path.write_text(json.dumps(data))
    return file.path


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"threads": 10**9}, "options.threads: expected int <= 4096"),
        ({"threads": 0}, "options.threads: expected int >= 1"),
        ({"workers": -3}, "options.workers: expected int >= 1"),
        ({"workers": "evil"}, "workers: evil is no address"),
        ({"sequences": -1}, "options.sequences: expected int >= 1"),
        ({"reference_bytes": -1}, "options.reference_bytes: expected int >= 0"),
        ({"limits": {"pixels": 10**30}}, "options.limits.pixels: "),
        ({"limits": {"seconds": 0}}, "options.limits.seconds: expected int >= 1"),
        ({"precision": float("nan")}, "options.precision: expected float "),
        ({"settings": {"compute": "int8"}}, "expected one of float64, float32, bfloat16, float16"),
        ({"recipes": [["*=bf16"]] * 500, "at": 0}, "it has 500 recipes, and a session keeps 401"),
        ({"at": 10**30}, "there is no recipe 1000000000000000000000000000000"),
        ({"at": float("nan")}, "at: expected int, got float"),
        ({"recipes": [["{0..99999999999}=bf16"]]}, "over 100000 numbers"),
        ({"path": 5}, "path: expected a path, got int"),
        ({"scanned": ["\x1b[2J"]}, "unknown dtype '\\x1b[2J'"),
        ({"reference": "net.py:Net"}, "Python code is named on the command line"),
    ],
)
def test_session_with_invalid_options_is_refused_in_one_sentence(changes: dict[str, Any], says: str) -> None:
    path = edited(**changes)
    with pytest.raises(UserError) as told:
        read_session(path)
    assert str(told.value).startswith(f"the session {path} can't be read: ")
    assert says in str(told.value)
    assert str(told.value).isprintable()


def test_session_file_writable_by_others_cannot_name_a_dask_scheduler() -> None:
    """The app would unpickle whatever a Dask scheduler sends."""
    path = edited(workers="tcp://10.0.0.1:8786")
    assert saved_session(None).options.workers == "tcp://10.0.0.1:8786"
    path.chmod(0o666)
    for model in (None, "demo"):
        with pytest.raises(
            UserError, match=r"works on the cluster at tcp://10\.0\.0\.1:8786, and someone else could have"
        ):
            saved_session(model)


def test_ssh_option_as_a_host_in_a_session_is_refused() -> None:
    from dtype_tui.cli.remote import address_of

    edited(model="ssh://-oProxyCommand=touch x/y")
    saved = saved_session(None)
    with pytest.raises(UserError, match="is no address"):
        address_of(saved.model or "")


async def test_hostile_session_texts_are_drawn_escaped() -> None:
    text = "\x1b]0;owned\x07\u202e"
    output = dataclasses.replace(
        MEASURED.output, kl_mean=float("nan"), sqnr_db=float("inf"), mean_abs=1e308, elements=2**60
    )
    entry = msgspec.structs.replace(
        MEASURED,
        inputs=text,
        output=output,
        planned_bytes=2**60,
        seconds=float("inf"),
        recipe=Recipe((Rule(text, "int8"),)),
    )
    path = edited()
    SessionFile.save(
        _at(path),
        SavedSession(
            None,
            text,
            Path(DEMO),
            rule_lists=(RuleList(), RuleList.of(entry.recipe.rules)),
            at=1,
            cursor=text,
            measured=(entry,),
        ),
    )
    async with launched(saved=read_session(path)) as (app, pilot):
        for key in ("H", "escape", "U", "M"):
            await pilot.press(key)
            await pilot.pause()
            assert all(character.isprintable() or character == "\n" for character in screen(app))
        assert app.is_running


def _at(path: Path) -> SessionFile:
    file = SessionFile()
    file.path = path
    return file


# -- two apps, and a disk that takes nothing ---------------------------------------------------------------------------


async def test_two_apps_that_resume_one_session_save_to_separate_files() -> None:
    before = edited()
    content = before.read_bytes()
    for recipe in (MLP, BF16):
        async with launched(saved=read_session(before), saver=saver) as (app, pilot):
            await cast(app, pilot, recipe)
    assert before.read_bytes() == content
    kept = [read_session(path).recipe for path in sessions_folder().glob("*.json") if path != before]
    assert sorted(map(str, kept)) == sorted(map(str, (MLP, BF16)))


REFUSALS: dict[str, tuple[str, str]] = {
    "no folder": ("/proc/self/nowhere", "can't keep the session in /proc/self/nowhere"),
    "a file in its place": ("/dev/null", "can't keep the session in /dev/null"),
    "a full disk": ("", "File too large: raise the limit, `ulimit -f`; --resume will not know this session"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", REFUSALS)
async def test_session_that_cannot_be_saved_gives_a_notice_and_the_app_continues(
    what: str, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, says = REFUSALS[what]
    if folder:
        monkeypatch.setenv("XDG_STATE_HOME", folder)
        await _tells(says)
        return
    with full_disk():
        await _tells(says)
    assert list((state / "dtype-tui" / "sessions").iterdir()) == []


async def _tells(says: str) -> None:
    async with launched(saver=saver) as (app, pilot):
        await cast(app, pilot, BF16)
        await until(pilot, lambda: app._saver is not None and app._saver._trouble is not None)
        app._save_session()
        await until(pilot, lambda: any(says in notice.message for notice in app.messages))
        await pilot.press("3")
        assert app.controller.experiment.recipe != BF16
        assert app.is_running


def test_session_is_saved_despite_undeletable_files_and_paths_that_are_no_utf_8(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dtype_tui.state.session_store.MOST_KEPT", 0)
    (sessions_folder() / "folder.json").mkdir(parents=True)
    file = SessionFile()
    file.save(SavedSession("/models/not-utf8-\udcff", "title", Path("/models/not-utf8-\udcff")))
    assert [path.name for path in sessions_folder().iterdir()] == ["folder.json"]
    monkeypatch.setattr("dtype_tui.state.session_store.MOST_KEPT", 9)
    file.save(SavedSession("/models/not-utf8-\udcff", "title"))
    assert [saved.model for saved in recent_models()] == ["/models/not-utf8-\udcff"]


# -- clocks ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("years", [-20, 20])
async def test_jumps_of_the_system_clock_do_not_affect_remaining_times(
    years: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app(saver=saver)
    now = time.time
    async with running(app) as pilot:
        await cast(app, pilot, BF16)
        assert app.controller.life.activity._clock is time.monotonic
        await say(app, pilot, events.WorkingProgress(BF16, "scan", 1, 100))
        monkeypatch.setattr(time, "time", lambda: now() + years * 365 * 86400)
        await say(app, pilot, events.WorkingProgress(BF16, "scan", 2, 100))
        left = app.controller.life.activity.seconds_left
        assert left is None or left < 3600
        app.main.say("a notice", "warning")
        await pilot.press("j", "M")
        await pilot.pause()
        assert "a notice" in screen(app)
        await pilot.press("escape")
        await say(app, pilot, events.Idle())
        assert app.is_running
        assert engine(app).recipes[-1] == BF16


def test_measurements_of_a_session_saved_in_the_future_are_ignored() -> None:
    """A file of the model that was written after the session may still seem older than it."""
    session = SavedSession(None, "demo", Path(DEMO), measured=(MEASURED,))
    assert session.valid_measurements == (MEASURED,)
    later = datetime.now(UTC) + timedelta(days=365)
    assert dataclasses.replace(session, saved=later).valid_measurements == ()
    assert demo_tree().tensors
