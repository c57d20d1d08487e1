"""The last line that a program prints replaces the progress on the terminal."""

from __future__ import annotations

import io
import signal
import sys
import time

import click
import pytest

from dtype_engine.cli.program import run, say
from dtype_engine.core.errors import UserError


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("error", "last"),
    [
        (UserError("no such folder"), "program: no such folder"),
        (ZeroDivisionError("by nothing"), "program: unexpected ZeroDivisionError"),
    ],
)
@pytest.mark.parametrize("steps", [(), ("loading",), ("loading", "measuring"), ("loading", "")])
def test_error_message_overwrites_the_progress_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception, last: str, steps: tuple[str, ...]
) -> None:
    @click.command()
    def command() -> None:
        for step in steps:
            say(step)
        raise error

    monkeypatch.setattr(sys, "stderr", Screen())
    assert run(command, "program", []) == 2
    said = sys.stderr.getvalue()  # type: ignore[attr-defined]
    lines = [line.rpartition("\r\x1b[K")[2] for line in said.split("\n")]
    assert len(lines) == 2
    assert lines[0].startswith(last)
    assert said.count("\x1b[K") == len(steps) + bool(steps and steps[-1])


@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")
def test_signal_that_the_system_repeats_does_not_interrupt_the_removal_of_files(
    capsys: pytest.CaptureFixture[str],
) -> None:
    removed = []

    @click.command()
    def wait() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        try:
            time.sleep(20)
        finally:
            time.sleep(0.2)
            removed.append(True)

    before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    try:
        assert run(wait, "program", []) == 128 + signal.SIGALRM
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert removed == [True]
    assert capsys.readouterr().err.strip() == "program: interrupted by SIGALRM"
