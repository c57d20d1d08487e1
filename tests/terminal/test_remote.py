"""The app in a real pseudo-terminal, with its engine behind a slow line that is cut, or with something hostile there instead."""

from __future__ import annotations

import os
import re
import shlex
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest
from tests.helpers import preloaded, slow_line
from tests.helpers.terminal import Opener

from dtype_engine.service.control import PROTOCOL

pytestmark = pytest.mark.slow


@pytest.fixture
def opened(opened: Opener) -> Opener:
    return partial(opened, forked=False)


def line_to(folder: Path, *command: str) -> str:
    """Return a command that runs another one behind a line of 150 ms each way. folder: for the files that control the line."""
    return shlex.join([sys.executable, slow_line.__file__, str(folder), "0.15", *command])


def test_result_of_a_remote_engine_arrives_after_a_lost_connection(opened: Opener, tmp_path: Path) -> None:
    options = ("stdio", "--compressed", "--linger", "1m", "--session", "{session}")
    engine = (*preloaded.command(preloaded.LINGERING), *options)
    terminal = opened("--engine-command", line_to(tmp_path, *engine))
    _, down = slow_line.look_around(terminal, tmp_path)
    assert down <= 30_000, "bytes for opening the demo and measuring it"
    slow_line.measure_over_a_cut(terminal, tmp_path, lambda: slow_line.cut(tmp_path))
    terminal.press("q")
    terminal.wait_for("1 rule would be lost")
    terminal.leave()


def test_ssh_address_starts_the_engine_on_the_host(opened: Opener, tmp_path: Path) -> None:
    """A program in place of ssh runs the remote command in a shell, as sshd does."""
    (tmp_path / "far").mkdir()
    engine = tmp_path / "far" / "dtype-engine"
    engine.write_text(f'#!/bin/sh\nexec {shlex.join(preloaded.command(preloaded.LINGERING))} "$@"\n')
    engine.chmod(0o755)
    fake = tmp_path / "ssh"
    fake.write_text(f"""#!{sys.executable}
import os, sys
words = sys.argv[1:]
open({str(tmp_path / "said")!r}, "w").write(repr(words))
os.environ["PATH"] = {str(engine.parent)!r} + ":" + os.environ["PATH"]
os.execvp("sh", ["sh", "-c", words[words.index("--") + 2]])
""")
    fake.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    terminal = opened("ssh://me@far:2222", environment=environment)
    terminal.wait_for("perplexity")
    assert "'-p', '2222', '--', 'me@far'" in (tmp_path / "said").read_text()
    terminal.press("e")
    terminal.wait_for("to a new folder on me@far")
    terminal.press("\x1b")
    terminal.leave()
    for model, words in (("ssh://far/nowhere", "no such folder"), ("ssh://-far/x", "is no address")):
        refused = opened(model, environment=environment)
        assert refused.exit_status(60) == 2
        assert words in " ".join(refused.text.split())


HELLO = (
    f"PROTOCOL = {PROTOCOL}"
    + r"""
import sys, zlib, msgspec
def put(*message):
    data = msgspec.msgpack.encode(message)
    write(len(data).to_bytes(4, "big") + data)
def write(data):
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
write(b"\0dtype-engine\0")
put("Hello", PROTOCOL, "x", [], 0, False)
put("Opened", "m\x1b[2J\x1b]0;owned\x07", "")
"""
)
TREE = r"""
put("TreePart", True, [["a\x1b[2J\x1b]0;owned\x07.weight", [2, 2], "float32"]], [["a\x1b[2J\x1b]0;owned\x07", "K\x1b[31m", None]])
put("ModelReady", None, "C\x1b[2J", "d\x07", 1.0, "i\x1b[2J", ["n\x1b]0;owned\x07"], None)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (HELLO + "write(bytes(range(1, 256)) * 9999)", "understand"),
        (HELLO + "write(b'\\xff\\xff\\xff\\xff')\nwrite(b'x' * 99999)", "understand"),
        (HELLO + "put('Composed', 0, 'text', [])\nsys.stdin.read()", "understand"),
        (HELLO + TREE, "ready|opening|a.x1b"),
    ],
    ids=["garbage", "4 GB", "a file unasked", "control characters"],
)
def test_app_survives_a_hostile_engine(
    opened: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, words: str
) -> None:
    script = tmp_path / "hostile.py"
    script.write_text(program)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    terminal = opened("--engine-command", shlex.join([sys.executable, str(script)]))
    terminal.wait_for(words)
    assert b"owned\x07" not in terminal.raw
    terminal.press("?")
    terminal.wait_for("Esc")
    terminal.press("\x1b")
    terminal.leave()
    assert not list((tmp_path / "work").iterdir())


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (HELLO.replace('PROTOCOL, "x"', '99, "9.9\x1b]0;owned\x07"'), "has dtype-tui 9.9"),
        ("while True: print('y' * 100_000, end='')", "no mark of dtype-engine"),
        ("print('welcome')\nraise SystemExit(1)", "ended|no answer"),
    ],
    ids=["another version", "endless line", "a login that says goodbye"],
)
def test_engine_command_that_is_no_engine_is_refused_in_one_line(
    opened: Opener, tmp_path: Path, program: str, words: str
) -> None:
    script = tmp_path / "hostile.py"
    script.write_text(program)
    terminal = opened("--engine-command", shlex.join([sys.executable, str(script)]))
    assert terminal.exit_status(60) == 2
    assert re.search(words, " ".join(terminal.text.split())), terminal.text
    assert b"owned\x07" not in terminal.raw
    assert b"\x1b[?1049h" not in terminal.raw


def test_compression_bomb_from_a_remote_engine_takes_little_memory(opened: Opener, tmp_path: Path) -> None:
    """What comes over ssh is compressed: a kilobyte may stand for a megabyte, and the line goes on as long as it likes."""
    script = tmp_path / "hostile.py"
    script.write_text(f"""#!{sys.executable}
import sys, zlib, msgspec
PROTOCOL = {PROTOCOL}
packer = zlib.compressobj()
def put(*message):
    data = msgspec.msgpack.encode(message)
    write(len(data).to_bytes(4, "big") + data)
def write(data):
    sys.stdout.buffer.write(packer.compress(data) + packer.flush(zlib.Z_SYNC_FLUSH))
    sys.stdout.buffer.flush()
sys.stdout.buffer.write(b"\\0dtype-engine\\0")
put("Hello", PROTOCOL, "x", [], 0, False)
put("Opened", "m", "")
sys.stdin.buffer.read(1)
while True:
    write(bytes(1 << 26))
""")
    script.chmod(0o755)
    (tmp_path / "ssh").symlink_to(script)
    terminal = opened("ssh://far/demo", environment={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    terminal.wait_for("understand", 60)
    assert psutil.Process(terminal.pid).memory_info().rss < 400 << 20
    terminal.leave()
