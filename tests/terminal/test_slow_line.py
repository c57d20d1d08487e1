"""The app over a line of 9,600 baud, and over one that is fast, in a terminal that says where its cursor is."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import termios
import time
import tty
from collections.abc import Iterator

import psutil
import pytest
from tests.helpers.throttled_terminal import BAUD_9600, ThrottledTerminal

pytestmark = pytest.mark.slow
QUESTION = b"\x1b[6n"


@pytest.fixture
def terminal() -> Iterator[ThrottledTerminal]:
    opened = ThrottledTerminal("demo", rate=BAUD_9600, forked=True)
    opened.wait_for("embed_tokens")
    yield opened
    opened.close()


def bytes_until_it_stands(terminal: ThrottledTerminal, key: str, row: int) -> int:
    """What arrived between a key and the cursor in its row: what the line is busy with for so long."""
    before = len(terminal.raw)
    terminal.seconds_until_it_stands(key, row)
    return len(terminal.raw) - before


def test_keys_are_answered_before_the_panes_are_drawn(terminal: ThrottledTerminal) -> None:
    assert len(terminal.raw) < 1500, "the tree comes first"
    terminal.wait_for("measuring|ready", 120)
    # All of it while the engine opens the model, measures it and finds its floor, which writes 30 KB to a fast line.
    taken = []
    for number in range(12):
        down = number % 4 < 2
        taken.append(bytes_until_it_stands(terminal, "j" if down else "k", number % 4 + 2 if down else 4 - number % 4))
        until = time.monotonic() + 0.3 * (number % 3)
        while time.monotonic() < until:
            terminal.read(0.02)
    assert sorted(taken)[len(taken) // 2] < 500, taken
    assert max(taken) < 1200, taken


def test_what_stands_at_the_end_is_the_whole_screen(terminal: ThrottledTerminal) -> None:
    terminal.wait_for(r"SQNR +exact", 120)
    for key in ("?", "\x1b", "2", "j", "H"):
        terminal.press(key)
        time.sleep(0.3)
        terminal.read()
    terminal.wait_for("Enter goes back", 60)
    terminal.press("\x1b")
    terminal.wait_for("mean", 60)
    terminal.wait_for(" ready ", 120)
    terminal.settle()
    slow = terminal.text
    terminal.rate = None  # the line is fast now
    terminal.resize(100, 30)
    terminal.settle()
    terminal.resize(80, 24)
    terminal.settle()
    assert terminal.text == slow


def test_suspended_it_leaves_no_answer_to_the_shell_and_draws_all_when_it_goes_on(terminal: ThrottledTerminal) -> None:
    terminal.wait_for("measuring|ready", 120)
    terminal.press("\x1a")
    until = time.monotonic() + 30
    while psutil.Process(terminal.pid).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < until, "ctrl+z did not stop it"
        terminal.read(0.05)
    terminal.settle()
    assert terminal.is_restored()
    terminal.screen.reset()
    os.kill(terminal.pid, signal.SIGCONT)
    terminal.wait_for(r"❯▾ demo[\s\S]*embed_tokens[\s\S]*q quit", 60)
    terminal.press("q")
    assert terminal.exit_status() == 0
    terminal.settle()
    assert terminal.is_restored()
    assert typed_into_the_shell(terminal) == 0


def typed_into_the_shell(terminal: ThrottledTerminal) -> int:
    """Bytes that wait to be read by what comes after the program."""
    tty.setraw(terminal.keyboard)
    return int(struct.unpack("i", fcntl.ioctl(terminal.slave, termios.FIONREAD, b"\0\0\0\0"))[0])


@pytest.mark.parametrize("answers", [True, False])
def test_a_fast_line_gets_whole_frames_and_few_questions(answers: bool) -> None:
    terminal = ThrottledTerminal("demo", rate=None, answers=answers, size=(120, 36), forked=True)
    try:
        terminal.wait_for(" ready ", 120)
        terminal.settle()
        asked = terminal.raw.count(QUESTION)
        assert asked <= 8
        before = len(terminal.raw)
        for key in "jjjkkjkj":
            terminal.press(key)
            terminal.settle(quiet=0.3)
        assert terminal.raw.count(QUESTION) == asked
        assert len(terminal.raw) - before <= 8 * 460
    finally:
        terminal.close()
