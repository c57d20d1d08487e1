"""Keys that come in one write, as over a slow line, to the installed program."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import safe_open
from tests.helpers.terminal import Terminal

UP, DOWN, LEFT, DELETE = "\x1b[A", "\x1b[B", "\x1b[D", "\x1b[3~"
ESCAPE = "\x1b[27u"
"""As terminals send it that can tell Escape and a letter from Alt and the letter."""
CTRL_A, CTRL_E, CTRL_U, CTRL_W, BACKSPACE = "\x01", "\x05", "\x15", "\x17", "\x7f"


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    with Terminal("demo", size=(120, 36), forked=True) as opened:
        opened.wait_for(r"SQNR +exact", 120)
        opened.wait_for("ready")
        yield opened


def wait_until_gone(terminal: Terminal, words: str) -> None:
    terminal.wait_for(rf"\A(?![\s\S]*{re.escape(words)})", 20)


def test_keys_in_one_burst_act_in_the_terminal_like_single_keys(terminal: Terminal, tmp_path: Path) -> None:
    edited = f"abc{BACKSPACE}d{CTRL_A}{DELETE * 3}*.mp{LEFT}l{CTRL_E}=xx{CTRL_W}bf16"
    terminal.press(f"c{CTRL_U}{edited}\r2j")
    terminal.wait_for(r"1 \*\.mlp +bf16", 20)
    terminal.wait_for(r"2 \* +bf16", 20)
    wait_until_gone(terminal, "cast PATTERN=DTYPE")

    terminal.press(f"czzz{ESCAPE}u:unx{BACKSPACE}\t\r")
    wait_until_gone(terminal, "1 *.mlp")
    wait_until_gone(terminal, "cast PATTERN=DTYPE")

    terminal.press(f"/nroam{BACKSPACE * 4}orm\r2")
    wait_until_gone(terminal, "up_proj")
    terminal.wait_for(r"1 model\S*input\S* +bf16", 20)
    terminal.press(f"{ESCAPE}u:cas\t *.mlp f16\r")
    terminal.wait_for(r"1 \*\.mlp +f16", 20)
    terminal.wait_for("ready", 30)

    terminal.press(f"e{DOWN}{UP}{CTRL_U}{tmp_path}/casts\r")
    terminal.wait_for(r"ready", 60)
    terminal.read_until((tmp_path / "casts" / "README.md").exists, 30)
    with safe_open(next((tmp_path / "casts").glob("*.safetensors")), "pt") as written:
        assert "F16" in {written.get_slice(name).get_dtype() for name in written.keys()}  # noqa: SIM118

    terminal.press("fff")
    terminal.wait_for("Dtype flow", 30)
    terminal.press(ESCAPE)
    wait_until_gone(terminal, "Dtype flow")
    until = time.monotonic() + 2
    while time.monotonic() < until:
        terminal.read(0.1)
        assert "Dtype flow" not in terminal.text

    terminal.press("cabc\x1bq")  # without a pause a terminal of the old kind sends alt+q for this
    assert terminal.exit_status() == 0
    assert terminal.is_restored()
