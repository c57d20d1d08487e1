"""An engine that sends events without end, in a real pseudo-terminal: keys work, memory is bounded, and a signal ends the app."""

from __future__ import annotations

import os
import signal
import sys
import time

import psutil
import pytest
from tests.helpers.flooding_engine import FLOODS
from tests.helpers.paths import ROOT
from tests.helpers.terminal import Terminal

_MOST_BYTES = 500 << 20
_SECONDS = 5.0
"""The app ends a second after a signal, the engine's 0.3 s included. A machine that runs other tests needs longer."""


def flooded(kind: str, *, size: tuple[int, int] = (100, 30)) -> Terminal:
    command = f"env PYTHONPATH={ROOT} {sys.executable} -m tests.helpers.flooding_engine {kind}"
    terminal = Terminal("--engine-command", command, size=size)
    terminal.wait_for(r"\A +flood", 60)
    return terminal


def ended(engine: psutil.Process) -> bool:
    """Return whether the engine ends within `_SECONDS`. A zombie counts as ended."""
    until = time.monotonic() + _SECONDS
    while time.monotonic() < until:
        try:
            if engine.status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def assert_ends_on_a_signal(terminal: Terminal, engine: psutil.Process) -> None:
    os.kill(terminal.pid, signal.SIGTERM)
    assert terminal.exit_status(_SECONDS) == 128 + signal.SIGTERM
    assert terminal.is_restored()
    assert ended(engine)


@pytest.mark.parametrize("kind", FLOODS)
def test_keys_and_signals_work_during_a_flood_of_events(kind: str) -> None:
    with flooded(kind) as terminal:
        app = psutil.Process(terminal.pid)
        (engine,) = app.children()
        for _ in range(2):
            terminal.press("?")
            terminal.wait_for("Here: flood", 30)
            terminal.press("\x1b")
            terminal.wait_for(r"\A(?s:(?!.*Here: flood))", 30)
            assert app.memory_info().rss < _MOST_BYTES
        assert "no engine" not in terminal.text, "the flood goes on"
        assert_ends_on_a_signal(terminal, engine)


def test_signal_ends_the_app_while_it_draws_many_windows() -> None:
    """Drawing them keeps the event loop busy for longer than the limit, and so would unmounting them."""
    with flooded("windows", size=(200, 50)) as terminal:
        (engine,) = psutil.Process(terminal.pid).children()
        terminal.wait_for("Dtype flow", 60)
        assert_ends_on_a_signal(terminal, engine)


def test_signal_ends_the_app_if_the_terminal_blocks() -> None:
    with flooded("messages") as terminal:
        for _ in range(100):  # redrawing fills what the terminal holds, since nothing is read
            terminal.press("?\x1b")
        time.sleep(1.0)
        os.kill(terminal.pid, signal.SIGTERM)
        until = time.monotonic() + _SECONDS
        while (status := terminal.ended()) is None and time.monotonic() < until:
            time.sleep(0.02)
        assert status == 128 + signal.SIGTERM
        while terminal.read(0.1):
            pass
        assert terminal.is_restored()
