"""The tour in the installed program, in a real pseudo-terminal."""

from __future__ import annotations

import re
import time
from functools import partial
from pathlib import Path

import pytest
import yaml
from tests.helpers.terminal import QUICK, Opener

from dtype_tui.state.tour import STEPS

DOWN, LEFT, ESCAPE, CTRL_T = "\x1b[B", "\x1b[D", "\x1b[27u", "\x14"
KEYS = (
    f"{DOWN * 4}l{DOWN * 2}2", "c\t\r", "d", "x", f"{ESCAPE}Hc{DOWN}c", f"{ESCAPE * 2}s\r", "o", f"{ESCAPE}e{DOWN}\r",
)  # fmt: skip
"""For each step. On the front, more keys follow when it has been computed."""


@pytest.fixture
def opened(opened: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Opener:
    monkeypatch.chdir(tmp_path)
    return partial(opened, size=(80, 24))


def test_tour_leads_to_a_recipe_file(opened: Opener, tmp_path: Path) -> None:
    terminal = opened("tour")
    terminal.wait_for(r"Tour 1 of")
    terminal.wait_for("embed_tokens")
    assert len(KEYS) == len(STEPS)
    begun = time.perf_counter()
    for number, keys in enumerate(KEYS, 1):
        terminal.wait_for(rf"Tour {number} of {len(STEPS)} .*leaves it", 240)
        terminal.press(keys)
        if keys == "o":
            terminal.wait_for(r"point \d+ of", 60)
            (point,) = re.findall(r"point (\d+) of", terminal.text)
            terminal.press(LEFT * 3)
            terminal.wait_for(rf"point {int(point) - 3} of(?![\s\S]*Computing)[\s\S]* → \w", 60)
            terminal.press("\r")
    terminal.wait_for("That is all", 60)
    assert time.perf_counter() - begun < 60, "two minutes with a minute for reading, even on a busy machine"
    terminal.read_until(lambda: list(tmp_path.glob("*.yaml")), 60)
    saved = yaml.safe_load(next(tmp_path.glob("*.yaml")).read_text())
    assert saved["rules"]
    assert saved["measured"]["inputs"].startswith("2 default prompts"), "few inputs, so that the tour does not wait"
    terminal.press(CTRL_T)
    terminal.wait_for(r"\A(?![\s\S]*Tour \d)", 20)
    terminal.leave()


def test_tour_is_offered_at_the_first_start_only(opened: Opener, tmp_path: Path) -> None:
    state = {"XDG_STATE_HOME": str(tmp_path / "state")}
    terminal = opened("demo", *QUICK, environment=state, first=True)
    terminal.wait_for("New here")
    terminal.press(CTRL_T)
    terminal.wait_for("Tour 1 of", 20)
    terminal.leave()
    terminal = opened("demo", *QUICK, environment=state, first=True)
    terminal.wait_for("ready", 120)
    assert not re.search("New here|Tour", terminal.text)
