"""The session is kept, however the program ends, and `--resume` continues it."""

from __future__ import annotations

import os
import shlex
import signal
import time
from functools import partial
from pathlib import Path

import pytest
from tests.helpers import preloaded
from tests.helpers.terminal import Opener, Terminal

from dtype_engine import Options, Recipe, Rule, RunSettings
from dtype_tui.state.rule_list import RuleList
from dtype_tui.state.session_store import SavedSession, SessionFile, read_session


@pytest.fixture
def opened(opened: Opener, tmp_path: Path) -> Opener:
    return partial(opened, environment={"XDG_STATE_HOME": str(tmp_path)})


def saved(tmp_path: Path) -> list[SavedSession]:
    files = (tmp_path / "dtype-tui" / "sessions").glob("*.json")
    return [read_session(path) for path in sorted(files, key=lambda path: path.stat().st_mtime_ns)]


def wait_until_saved(terminal: Terminal, tmp_path: Path, rules: int) -> None:
    terminal.read_until(lambda: (found := saved(tmp_path)) and len(found[-1].recipe) == rules, 30)


def cast_two(terminal: Terminal) -> None:
    """Cast two nodes in the first second after the start: no key waits for the engine."""
    terminal.wait_for("embed_tokens")
    terminal.press("jj2jjlj3")
    terminal.wait_for("2 model.layers.0 +f16")


def lose(terminal: Terminal) -> None:
    """Close the terminal, as when sshd dies: the kernel sends SIGHUP to the session. Fails if the program does not end."""
    os.close(terminal.keyboard)
    os.close(terminal.slave)
    until = time.monotonic() + 20
    ended = False
    while not ended and time.monotonic() < until:
        ended = terminal.ended() is not None
        time.sleep(0.02)
    terminal.keyboard, terminal.slave = os.openpty()
    assert ended, "the program outlived its terminal"


@pytest.mark.parametrize("ending", ["SIGHUP", "SIGTERM", "SIGKILL", "the line goes dead"])
def test_session_is_saved_if_the_terminal_is_lost(opened: Opener, tmp_path: Path, ending: str) -> None:
    terminal = opened()
    cast_two(terminal)
    if ending == "SIGKILL":
        wait_until_saved(terminal, tmp_path, 2)
    if ending == "the line goes dead":
        lose(terminal)
    else:
        os.kill(terminal.pid, signal.Signals[ending])
        number = signal.Signals[ending]
        assert terminal.exit_status() == (-number if ending == "SIGKILL" else 128 + number)
    (kept,) = saved(tmp_path)
    assert [str(rule) for rule in kept.recipe.rules] == ["model.embed_tokens=bfloat16", "model.layers.0=float16"]
    assert kept.cursor == "model.layers.0"
    assert len(kept.rule_lists) == 3


@pytest.mark.parametrize("arguments", [(), ("--engine-command",)], ids=["kept", "not kept"])
@pytest.mark.parametrize("seen", [1, 2000, 30000], ids=["at the first byte", "at the first screen", "when it stands"])
def test_terminal_lost_while_starting_ends_the_program(opened: Opener, seen: int, arguments: tuple[str, ...]) -> None:
    engine = shlex.join([*preloaded.command(preloaded.COMMAND), "stdio"])
    terminal = opened(*arguments, *[engine] * len(arguments))
    until = time.monotonic() + 60
    while len(terminal.raw) < seen and time.monotonic() < until:
        terminal.read(0.01)
    lose(terminal)


def test_session_resumes_with_history_and_cursor(opened: Opener, tmp_path: Path) -> None:
    rules = [Rule("model.embed_tokens", "bfloat16"), Rule("lm_head", "float16")]
    recipes = (Recipe(), Recipe((rules[0],)), Recipe(tuple(rules)))
    file = SessionFile()
    file.path = tmp_path / "dtype-tui" / "sessions" / "20260101-000000-00000000.json"
    file.save(
        SavedSession(
            None,
            "demo",
            rule_lists=tuple(RuleList.of(recipe.rules) for recipe in recipes),
            at=1,
            cursor="model.layers.3.mlp",
            options=Options(settings=RunSettings(autocast="bfloat16")),
        )
    )
    back = opened("--resume")
    back.wait_for("1 model.embed_tokens +bf16")
    back.wait_for(r"▌ +▸ mlp")
    back.press("u")
    back.wait_for(r"▸ embed_tokens .* f32 ")  # with its class between, once the engine has told it
    back.press("\x12\x12")
    back.wait_for("2 lm_head +f16")
    back.leave()
    assert "2 rules not saved to a file: `dtype-tui --resume`" in back.text
    assert saved(tmp_path)[-1].options.settings == RunSettings(autocast="bfloat16")


def test_damaged_session_is_refused_in_one_line_with_exit_status_2(opened: Opener, tmp_path: Path) -> None:
    folder = tmp_path / "dtype-tui" / "sessions"
    folder.mkdir(parents=True)
    (folder / "20300101-000000-00000000.json").write_text('{"version": 1')
    terminal = opened("--resume")
    assert terminal.exit_status() == 2
    said = terminal.raw.decode()
    assert said.startswith("dtype-tui: the session ")
    assert "damaged" in said
    assert said.count("\n") == 1


def test_resume_without_a_session_is_refused(opened: Opener) -> None:
    terminal = opened("--resume")
    assert terminal.exit_status() == 2
    assert "no session to resume" in terminal.raw.decode()
