"""An engine that sends events without end, in a real pseudo-terminal: keys work, memory is bounded, and a signal ends the app."""

from __future__ import annotations

import os
import signal
import sys

import psutil
import pytest
from tests.helpers.flooding_engine import FLOODS
from tests.helpers.paths import ROOT
from tests.helpers.terminal import Terminal

_MOST_BYTES = 500 << 20
_SECONDS = 5.0
"""The app ends a second after a signal, the engine's 0.3 s included. A machine that runs other tests needs longer."""


@pytest.mark.parametrize("kind", FLOODS)
def test_keys_and_signals_work_while_an_engine_floods_the_app(kind: str) -> None:
    command = f"env PYTHONPATH={ROOT} {sys.executable} -m tests.helpers.flooding_engine {kind}"
    terminal = Terminal("--engine-command", command, size=(100, 30))
    try:
        terminal.wait_for(r"\A +flood", 60)
        app = psutil.Process(terminal.pid)
        (engine,) = app.children()
        for _ in range(2):
            terminal.press("?")
            terminal.wait_for("Here: flood", 30)
            terminal.press("\x1b")
            terminal.wait_for(r"\A(?s:(?!.*Here: flood))", 30)
            assert app.memory_info().rss < _MOST_BYTES
        assert "no engine" not in terminal.text, "the flood goes on"
        os.kill(terminal.pid, signal.SIGTERM)
        assert terminal.exit_status(_SECONDS) == 128 + signal.SIGTERM
        assert terminal.is_restored()
        assert not engine.is_running()
    finally:
        terminal.close()
