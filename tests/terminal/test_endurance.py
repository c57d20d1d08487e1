"""What a terminal does to a program all day: bursts, resizes, suspending, pastes, tmux, thousands of keys."""

from __future__ import annotations

import itertools
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.helpers import preloaded
from tests.helpers.terminal import QUICK, Terminal, with_engine
from tests.terminal.random_keys import storm


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    with Terminal("demo", *QUICK, forked=True) as made:
        made.wait_for("embed_tokens")
        yield made


def drain(terminal: Terminal, seconds: float) -> int:
    """Read until nothing has arrived for `seconds`. Returns the number of bytes."""
    count = 0
    while got := terminal.read(seconds):
        count += got
    return count


def test_keys_pressed_before_the_first_paint_are_handled() -> None:
    with Terminal("demo", *QUICK, forked=True) as terminal:
        while b"\x1b[?25l" not in terminal.raw:  # from here on the terminal gives keys as they are pressed
            terminal.read()
        terminal.press(":cast *.mlp bf16\r")
        terminal.wait_for(r"\*\.mlp +bf16 +18", 20)


def test_screen_is_complete_after_many_resizes(terminal: Terminal) -> None:
    terminal.wait_for("ready")
    chance = random.Random(7)
    for _ in range(60):
        terminal.resize(chance.randint(20, 200), chance.randint(5, 60))
        terminal.read(0.01)
    terminal.resize(100, 30)
    terminal.wait_for(r"Recipe", 20)
    terminal.wait_for(r"q quit", 20)
    drain(terminal, 0.5)
    assert "needs 60" not in terminal.text
    terminal.leave()


def test_suspended_app_resumes(terminal: Terminal) -> None:
    terminal.wait_for("ready")
    terminal.suspend()
    drain(terminal, 0.2)
    assert terminal.is_restored()
    os.kill(terminal.pid, signal.SIGCONT)
    terminal.wait_for("embed_tokens", 20)
    terminal.press("2")
    terminal.wait_for(r"\* +bf16", 20)
    terminal.leave()


def test_huge_paste_is_ignored_by_the_tree_and_inserted_once_in_a_prompt(terminal: Terminal) -> None:
    terminal.wait_for("ready")
    blob = ("\x1b[200~" + "q2u:x " * ((1 << 20) // 6) + "\x1b[201~").encode()

    def send(data: bytes) -> None:
        sent = 0
        os.set_blocking(terminal.keyboard, False)
        until = time.monotonic() + 60
        while sent < len(data) and time.monotonic() < until:
            try:
                sent += os.write(terminal.keyboard, data[sent : sent + 4096])
            except BlockingIOError:
                terminal.read(0.01)
        os.set_blocking(terminal.keyboard, True)
        assert sent == len(data)

    send(blob)
    terminal.press("j")
    terminal.wait_for(r"▌ +▾ model", 60)
    assert "No rules" in terminal.text
    terminal.press(":")
    terminal.wait_for(r"cast  causes  check  columns", 20)
    send(blob)
    terminal.wait_for("no command", 60)
    terminal.press("\x1b")
    terminal.read_until(lambda: "no command" not in terminal.text)
    terminal.leave()


def test_memory_does_not_grow_with_thousands_of_keys(terminal: Terminal) -> None:
    terminal.wait_for("ready")

    def keys(count: int) -> None:
        for _ in range(count // 400):
            terminal.press(10 * "jjlljjjhhkkkjjjjllkkkkjjhhllkkjjkkjjllhh")
            # No faster than it answers, so that no queue is taken for memory.
            terminal.press("G")
            terminal.wait_for(r"▌(?! ▾ demo)")
            terminal.press("<")
            terminal.wait_for("▌ ▾ demo")

    keys(2000)  # until the caches of lines and styles are full
    resident = [psutil.Process(terminal.pid).memory_info().rss]
    for _ in range(3):
        keys(1000)
        resident.append(psutil.Process(terminal.pid).memory_info().rss)
    grown = [after - before for before, after in itertools.pairwise(resident)]
    # What is kept of a key is kept of every key; what the engine tells once, a few MiB, comes in one of them.
    assert min(grown) < 128 << 10, f"{[size >> 10 for size in grown]} KiB more after 1000 keys each"
    terminal.leave()


def test_idle_app_and_cursor_moves_write_few_bytes_to_the_terminal(terminal: Terminal) -> None:
    terminal.wait_for("ready")
    drain(terminal, 1.0)
    began = time.monotonic()
    wrote = 0
    while time.monotonic() - began < 3:
        wrote += terminal.read(0.1)
    assert wrote < 1024, f"{wrote} bytes in 3 s without a key"
    terminal.press("E")
    drain(terminal, 0.5)
    for key, most in (("j", 1024), ("k", 1024), ("\x1b[6~", 12 << 10), ("\x1b[5~", 12 << 10)):
        terminal.press(key)
        wrote = 0
        while (
            not wrote
        ):  # however long a busy machine takes to answer; a key that changes nothing ends in the test's timeout
            wrote = terminal.read(0.4)
        wrote += drain(terminal, 0.4)
        assert wrote < most, f"{key!r} wrote {wrote} bytes"
    terminal.leave()


def test_ascii_is_used_if_the_locale_has_no_unicode() -> None:
    with Terminal("demo", *QUICK, environment={"LC_ALL": "C", "PYTHONUTF8": "1"}, forked=True) as terminal:
        terminal.wait_for("embed_tokens")
        terminal.press("2")
        terminal.wait_for(r"1 \* +bf16", 20)
        assert terminal.text.isascii()
        terminal.leave()


def test_model_picker_offers_models_of_the_current_folder(tmp_path: Path) -> None:
    from dtype_engine.checkpoint.source import DEMO

    for name in ("first", "second"):
        shutil.copytree(DEMO, tmp_path / name)
    os.chdir(tmp_path)
    try:
        terminal = Terminal(environment={"XDG_STATE_HOME": str(tmp_path / "state")}, forked=True)
    finally:
        os.chdir(Path(__file__).parent)
    try:
        terminal.wait_for(r"first/.*\n.*second/|second/.*\n.*first/", 20)
        terminal.press("\r")
        terminal.wait_for("embed_tokens", 20)
        terminal.wait_for("ready")
        terminal.leave()
    finally:
        terminal.close()


@pytest.mark.skipif(shutil.which("tmux") is None, reason="there is no tmux here")
def test_app_runs_in_tmux() -> None:
    name = f"dtype-tui-{uuid.uuid4().hex[:8]}"

    def tmux(*words: str) -> str:
        done = subprocess.run(["tmux", "-L", name, *words], capture_output=True, text=True, timeout=20)
        return done.stdout

    def wait_for(words: str, seconds: float = 60) -> None:
        until = time.monotonic() + seconds
        while words not in tmux("capture-pane", "-p", "-t", "t"):
            assert time.monotonic() < until, f"never saw {words!r}:\n" + tmux("capture-pane", "-p", "-t", "t")
            time.sleep(0.1)

    program = shlex.join(with_engine(preloaded.command(preloaded.ENGINE)))
    command = f"{program} demo {shlex.join(QUICK)}; echo it ended with $?; exec {sys.executable} -c 'input()'"
    tmux("new-session", "-d", "-s", "t", "-x", "120", "-y", "36", command)
    try:
        wait_for("embed_tokens")
        wait_for("ready")
        tmux("send-keys", "-t", "t", ":cast *.mlp bf16", "Enter")
        wait_for("bf16  18")
        tmux("resize-window", "-t", "t", "-x", "80", "-y", "24")
        wait_for("[Drift]")
        tmux("send-keys", "-t", "t", "u")
        wait_for("s scan")
        tmux("send-keys", "-t", "t", "q")
        wait_for("it ended with 0", 20)
        assert "embed_tokens" not in tmux("capture-pane", "-p", "-t", "t")
    finally:
        tmux("kill-server")


def test_random_keys_and_clicks_cause_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    storm(4, 300)  # what it passes over of Textual's own faults, it says
