"""How the program ends when something goes wrong: the terminal as it was, the session kept, a sentence and a true exit status."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dtype_engine.sessions import read_session
from terminal import Terminal

CLICK = "\x1b[<0;2;2M\x1b[<0;2;2m"
"""The left button pressed and let go in the second cell of the second line, beside every window."""

Opener = Callable[..., Terminal]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opener]:
    made: list[Terminal] = []

    def make(*arguments: str, **environment: str) -> Terminal:
        made.append(Terminal(*arguments, environment={"XDG_STATE_HOME": str(tmp_path / "state"), **environment}))
        return made[-1]

    yield make
    for terminal in made:
        terminal.close()


def leave(terminal: Terminal) -> None:
    terminal.press("q")
    assert terminal.exit_status() == 0
    assert terminal.is_restored()


@pytest.mark.parametrize("clicks", [2, 5])
def test_clicks_beside_the_palette_in_one_burst_close_it_once(opened: Opener, clicks: int) -> None:
    terminal = opened("demo")
    terminal.wait_for("embed_tokens")
    terminal.press("\x10")
    terminal.wait_for("Search for commands", 20)
    terminal.press(CLICK * clicks)
    until = time.monotonic() + 20
    while "Search for commands" in terminal.text:
        assert time.monotonic() < until, terminal.text
        terminal.read(0.1)
    terminal.press("2")
    terminal.wait_for(r"\* → bf16", 20)
    leave(terminal)


def test_an_error_that_nobody_foresaw_is_one_sentence_and_a_file(opened: Opener, tmp_path: Path) -> None:
    """Python itself runs this module at its start: a key of the program gets a handler that fails."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import sys, threading, time\n"
        "def spoil():\n"
        "    while not hasattr(sys.modules.get('dtype_tui.node_actions'), 'copy'): time.sleep(0.01)\n"
        "    def copy(app, text, what): raise RuntimeError(f'no copies of {what}')\n"
        "    sys.modules['dtype_tui.node_actions'].copy = copy\n"
        "threading.Thread(target=spoil, daemon=True).start()\n"
    )
    terminal = opened("demo", PYTHONPATH=str(tmp_path / "site"))
    terminal.wait_for("embed_tokens")
    terminal.press("2")
    terminal.wait_for(r"\* → bf16", 20)
    terminal.press("y")
    assert terminal.exit_status() == 2
    assert terminal.is_restored()
    said = terminal.raw[terminal.raw.rfind(b"\x1b[?1049l") :].decode()
    assert "dtype-tui: unexpected RuntimeError: no copies of the name" in said
    assert "Traceback" not in said
    (log,) = (tmp_path / "state" / "dtype-tui").glob("error-*.log")
    assert str(log) in said.replace("\r\n", "")
    assert "in copy" in log.read_text()
    assert log.stat().st_mode & 0o777 == 0o600
    (kept,) = (read_session(path) for path in (tmp_path / "state" / "dtype-tui" / "sessions").glob("*.json"))
    assert [str(rule) for rule in kept.recipe.rules] == ["*=bfloat16"]
