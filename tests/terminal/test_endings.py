"""How the program ends when something goes wrong: the terminal as it was, the session kept, a sentence and a true exit status."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from tests.helpers.terminal import Opener

from dtype_engine.checkpoint.source import DEMO
from dtype_tui.state.session_store import read_session

CLICK = "\x1b[<0;2;2M\x1b[<0;2;2m"
"""The left button, pressed and released in the second cell of the second line, where no window is."""


@pytest.fixture
def opened(opened: Opener, tmp_path: Path) -> Opener:
    state = {"XDG_STATE_HOME": str(tmp_path / "state")}
    return lambda *arguments, **environment: opened(*arguments, environment={**state, **environment})


@pytest.mark.parametrize("clicks", [2, 5])
def test_repeated_clicks_beside_the_command_palette_close_only_the_palette(opened: Opener, clicks: int) -> None:
    terminal = opened("demo")
    terminal.wait_for("embed_tokens")
    terminal.press("\x10")
    terminal.wait_for("Search for commands", 20)
    terminal.press(CLICK * clicks)
    terminal.read_until(lambda: "Search for commands" not in terminal.text)
    terminal.press("2")
    terminal.wait_for(r"\* +bf16", 20)
    terminal.leave()


def test_unexpected_error_prints_one_sentence_and_writes_a_log_file(opened: Opener, tmp_path: Path) -> None:
    """Python runs a `sitecustomize` module at its start, which gives a key of the program a handler that fails."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import sys, threading, time\n"
        "def spoil():\n"
        "    while not hasattr(sys.modules.get('dtype_tui.main_screen'), 'MainScreen'): time.sleep(0.01)\n"
        "    def copy(screen, text, what): raise RuntimeError(f'no copies of {what}')\n"
        "    sys.modules['dtype_tui.main_screen'].MainScreen._copy = copy\n"
        "threading.Thread(target=spoil, daemon=True).start()\n"
    )
    terminal = opened("demo", PYTHONPATH=str(tmp_path / "site"))
    terminal.wait_for("embed_tokens")
    terminal.press("2")
    terminal.wait_for(r"\* +bf16", 20)
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


# -- a file that is cut short under the program --------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a checkpoint that the test may damage."""
    return Path(shutil.copytree(DEMO, tmp_path / "model"))


@pytest.mark.skipif(sys.platform != "linux", reason="the signal is Linux's")
@pytest.mark.parametrize("moment", ["ready", "measuring", "scanning", "exporting"])
def test_truncated_file_is_reported_and_the_app_continues(
    opened: Opener, model: Path, tmp_path: Path, moment: str
) -> None:
    weights = model / "model.safetensors"
    long = tmp_path / "long.txt"
    long.write_text("import os\n" * 20_000)
    terminal = opened(str(model), "--text", str(long), "--sequences", "400")
    terminal.wait_for("embed_tokens")
    terminal.press("2")
    terminal.wait_for(r"\* +bf16", 20)
    terminal.wait_for(r"measuring: (reference|candidate)", 200)  # while it loads, measuring is what comes then
    if moment in ("ready", "scanning"):
        terminal.press("\x1b")
        terminal.wait_for("ready", 100)
    if moment == "scanning":
        terminal.press("s")
        terminal.wait_for("Every weight is scored", 20)
        terminal.press("\r")
        terminal.wait_for(r"scan +[0-9]+ %", 100)
    elif moment == "exporting":
        terminal.press("e")
        terminal.wait_for(r"tensors: bf16", 60)
        terminal.press("\x15" + str(tmp_path / "out") + "\r")
        terminal.wait_for("next: (measuring, )?writing", 20)
    os.truncate(weights, 100_000)
    terminal.press("jj3")
    terminal.wait_for(r"2 model.embed_tokens +f16", 20)
    terminal.wait_for(r"\bcut\b", 200)  # the sentence is broken between words
    terminal.press("w")
    terminal.wait_for("ready|no engine: R", 200)  # the engine has noticed it, or was ended by it
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))
    terminal.leave()
    (kept,) = (read_session(path) for path in (tmp_path / "state" / "dtype-tui" / "sessions").glob("*.json"))
    assert [str(rule) for rule in kept.recipe.rules] == ["*=bfloat16", "model.embed_tokens=float16"]
