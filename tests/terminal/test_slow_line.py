"""The app over a line of 50 kB/s with 200 ms there and back, in a terminal that answers questions and in one that answers none."""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.helpers.throttled_terminal import ThrottledTerminal

pytestmark = pytest.mark.slow
QUESTION = b"\x1b[6n"
LINE = 50_000
"""Bytes per second of the line."""
A_PAGE = 15_000
"""The bytes that a full redraw of a screen of 120 x 36 takes."""


@pytest.fixture(params=[True, False], ids=["answers", "mute"])
def terminal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ThrottledTerminal]:
    text = tmp_path / "text.txt"
    text.write_text(10 * Path(argparse.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    opened = ThrottledTerminal(
        "demo", "--cast", "*.mlp=bf16", "--text", str(text), forked=True, answers=bool(request.param)
    )
    yield opened
    opened.close()


def test_keys_are_answered_over_a_slow_connection_during_a_measurement(terminal: ThrottledTerminal) -> None:
    terminal.wait_for("measuring", 120)
    terminal.longest_queue_s = 0.0
    written = []
    for number in range(12):
        before = len(terminal.raw)
        terminal.seconds_until_it_stands("j" if number % 4 < 2 else "k", (3, 4, 3, 2)[number % 4])
        written.append(len(terminal.raw) - before)
        until = time.monotonic() + 0.2
        while time.monotonic() < until:
            terminal.read(0.02)
    terminal.wait_for("measuring", 5)  # and it goes on
    # What arrives until a key's answer stands takes the line no longer than the way there and back, but where the engine's
    # tree replaces the one on the screen, or all modules have their first figures.
    assert sorted(written)[len(written) // 2] < 0.2 * LINE, written
    assert max(written) < 8 * A_PAGE, written
    assert terminal.longest_queue_s < 8 * A_PAGE / LINE
    assert QUESTION not in terminal.raw


def test_screen_is_complete_after_resuming_over_a_slow_connection() -> None:
    with ThrottledTerminal("demo", forked=True) as terminal:
        terminal.wait_for("measuring|ready", 120)
        terminal.suspend(30)
        while terminal.read(0.5):
            pass
        assert terminal.is_restored()
        terminal.screen.reset()
        os.kill(terminal.pid, signal.SIGCONT)
        terminal.wait_for(r"▌ ▾ demo[\s\S]*embed_tokens[\s\S]*q quit", 60)
        terminal.leave()
