"""The engine dies in each of its states, by another signal each time; `engine_deaths` has all sixteen pairs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.terminal.engine_deaths import SIGNALS, Deaths, walk

ESC = "\x1b"


@pytest.mark.slow
def test_app_survives_the_death_of_its_engine_in_every_state(tmp_path: Path) -> None:
    walk(tmp_path, SIGNALS)


@pytest.mark.slow
def test_second_esc_ends_an_engine_that_does_not_stop(tmp_path: Path) -> None:
    """The engine opens a model whose code takes a minute, and then runs a layer that takes a minute."""
    deaths = Deaths(tmp_path, (80, 24), 60)
    with deaths.terminal as terminal:
        terminal.wait_for("Esc stop ", 60)
        first = deaths.engine()
        terminal.press(ESC)
        terminal.wait_for("stopping: ", 20)
        terminal.wait_for("not stopped: .*Esc again ends the engine", 20)
        deaths.slow(0.2)
        terminal.press(ESC)
        terminal.wait_for("measuring: reference", 60)
        deaths.slow(60)
        time.sleep(0.5)  # the layer under way is one that takes a minute
        second = deaths.engine()
        assert second.pid != first.pid
        terminal.press(ESC)
        terminal.wait_for("stopping: measuring", 20)
        assert 1.5 < terminal.wait_for("not stopped: measuring.*Esc again ends the engine", 20) < 10
        deaths.slow(0)
        terminal.press(ESC)
        deaths.measured(r"net.py:Net  Net +bf16")
        assert deaths.engine().pid != second.pid
        assert not second.is_running()
        terminal.leave()
