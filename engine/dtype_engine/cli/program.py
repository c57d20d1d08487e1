"""How both programs run a command, report on it, and end: one line for an error, an exit status, progress, JSON."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import click

from dtype_engine.cli.signals import ended_by, raised_signals
from dtype_engine.cli.streams import NobodyReads, answers, drop_unwritten, fill_closed, own_output
from dtype_engine.core.errors import UserError, one_line
from dtype_engine.core.job_pace import JobPace
from dtype_engine.core.text import printable
from dtype_engine.core.units import time_left

BAD_INPUT = 2
CLOSED_PIPE = 128 + 13  # SIGPIPE, which Python ignores
TRACEBACK = "DTYPE_TUI_TRACEBACK"


def print_json(value: Any) -> None:
    """One object on standard output."""
    json.dump(value, answers(), indent=2, ensure_ascii=False, allow_nan=False)
    answers().write("\n")


def answer(text: str, nl: bool = True) -> None:
    """What a command was asked for, on standard output. nl: with an end of line."""
    click.echo(text, answers(), nl)


def tell(line: str) -> None:
    """A line beside the answers, on standard error. That it can't be written there changes no answer and no status."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr)


_step = ""
"""What `say` has last written and nobody has wiped off yet."""


def say(step: str) -> None:
    """Progress for a person; nothing when standard error is not a terminal."""
    global _step
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{step}")
        sys.stderr.flush()
        _step = step


def _last_line(sentence: str) -> None:
    """The line on standard error that a program ends with, in the place of its progress."""
    if _step:
        say("")
    tell(sentence)


def note(sentences: Iterable[str]) -> None:
    """What a user should know beside the result, a sentence each, on standard error."""
    for sentence in sentences:
        tell(f"dtype-engine: note: {sentence}")


_BAR = 20
_pace = JobPace()


def say_share(what: str, done: int, total: int, said: str = "", job: str = "") -> None:
    """How much of a job is done: `said` (by default `what`), a bar, and the time left as soon as that can be guessed.

    job: where `what` is one of its parts, and `done` and `total` are of all of them. A total of 0: how much there is is not known.
    """
    if not total:
        say(said or what)
        return
    share = min(1.0, max(0.0, done / total))
    _pace.follow(job or what, share)
    left = _pace.seconds_left
    filled = round(_BAR * share)
    shown = f"{said or what} {100 * share:3.0f} % [{'#' * filled:.<{_BAR}}]"
    say(shown + (f" {time_left(left)} left" if left is not None else ""))


def say_progress(run: str, done: int, total: int) -> None:
    """How much of a measurement is done, and in which of its passes it is."""
    say_share(f"measuring: {run}", done, total, job="measuring")


def run(command: click.Command, program: str, arguments: Sequence[str] | None = None) -> int:
    """Run a click command by the project's rules for errors and exit statuses: one line, 2 for bad input, 128 and its number for
    a signal, without a word for SIGPIPE.
    """
    fill_closed()
    try:
        with own_output():
            return _status(command, program, arguments)
    finally:
        drop_unwritten()


def _status(command: click.Command, program: str, arguments: Sequence[str] | None) -> int:
    try:
        with raised_signals():
            result = command.main(args=arguments, prog_name=program, standalone_mode=False)
            sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except (UserError, click.ClickException) as error:
        text = error.format_message() if isinstance(error, click.ClickException) else str(error)
        _last_line(f"{program}: {' '.join(text.split())}")
        return BAD_INPUT
    except (KeyboardInterrupt, click.Abort) as error:
        return _told_interrupted(program, error)
    except NobodyReads:
        return CLOSED_PIPE
    except Exception as error:
        # One that strikes while a lock is taken makes the lock fail on the way out.
        interrupt = next((link for link in _chain(error) if isinstance(link, KeyboardInterrupt)), None)
        return told_unexpected(program, error) if interrupt is None else _told_interrupted(program, interrupt)


def _told_interrupted(program: str, error: BaseException) -> int:
    """Say in one line which signal it was; the exit status."""
    number = ended_by(error)
    name = "" if number == signal.SIGINT else f" by {signal.Signals(number).name}"
    _last_line(f"{program}: interrupted{name}")
    return 128 + number


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and those that it came of."""
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__


def told_unexpected(program: str, error: BaseException) -> int:
    """Say in one line that something happened which has no sentence of its own; the exit status.

    With DTYPE_TUI_TRACEBACK set, where it happened comes before that line.
    """
    if os.environ.get(TRACEBACK):
        traceback.print_exception(error)
    _last_line(f"{program}: {unexpected(error)}")
    return BAD_INPUT


def unexpected(error: BaseException) -> str:
    """An error that nobody thought of, in one line."""
    if isinstance(error, MemoryError):
        return "there is not enough memory for this"
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"can't read or write {printable(str(error.filename), 200)}: {error.strerror}"
    reason = one_line(error, 300, with_type=True)
    return f"unexpected {reason}; this is a fault of the program or of the file; {TRACEBACK}=1 shows where it arose"
