"""Runs a command of `dtype-engine` or `dtype-tui`: results on standard output, progress and one-line errors on standard error."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

import click

from dtype_engine.cli.streams import (
    ReaderGone,
    answers,
    answers_can_hold,
    drop_unwritten,
    fill_closed,
    own_output,
    replace_unusable_encodings,
)
from dtype_engine.core.errors import UserError, exhausted, one_line
from dtype_engine.core.job_pace import JobPace
from dtype_engine.core.text import is_printable, printable, without_controls
from dtype_engine.core.units import time_left

NO = 1
"""The exit status if a check failed."""
BAD_INPUT = 2
CLOSED_PIPE = 128 + 13  # the status of a program that SIGPIPE ends; Python ignores that signal
TRACEBACK = "DTYPE_TUI_TRACEBACK"


def print_json(value: Any) -> None:
    r"""Print one JSON object on standard output. \u escapes stand for characters that are invisible, control a terminal or the
    direction of text, or are not in the encoding of standard output.
    """
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    lines = (line if _is_plain(line) else "".join(map(_json_character, line)) for line in text.split("\n"))
    answers().writelines(f"{line}\n" for line in lines)


def _is_plain(text: str) -> bool:
    return is_printable(text) and answers_can_hold(text)


def _json_character(character: str) -> str:
    return character if _is_plain(character) else json.dumps(character)[1:-1]


def answer(text: str, nl: bool = True) -> None:
    """Print the result of a command. Control characters, and characters that the encoding of standard output lacks, are escaped."""
    click.echo(without_controls(text), answers(), nl)


def answer_file(text: str) -> None:
    """Print the content of a file. Raises UserError if the encoding lacks a character, since an escape would change the content."""
    if not answers_can_hold(text):
        raise UserError(
            f"standard output is {answers().encoding}, which lacks characters of this file: name a file with -o, or set "
            "PYTHONIOENCODING=utf-8"
        )
    answer(text, nl=False)


def print_stderr(line: str) -> None:
    """Print a line on standard error, if it can be written, with control characters escaped."""
    with contextlib.suppress(OSError):
        print(without_controls(line), file=sys.stderr)


_step = ""


def say(step: str) -> None:
    """Show the current step in place of the last one, if standard error is a terminal. "" erases the line."""
    global _step
    if (step or _step) and sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{step}")
        sys.stderr.flush()
        _step = step


def _last_line(sentence: str) -> None:
    say("")
    print_stderr(sentence)


def note(sentences: Iterable[str]) -> None:
    """Print each sentence on standard error as a note."""
    for sentence in sentences:
        print_stderr(f"dtype-engine: note: {sentence}")


_BAR = 20
_pace = JobPace()
_LONGEST_OF_CLICK, _KEPT = 600, 200
"""The most characters of a message of click, and how many are kept at each end of a longer one."""


def say_share(what: str, done: int, total: int, text: str = "", job: str = "") -> None:
    """Show how much of a piece of work is done, and the remaining time once it can be estimated. If `total` is 0, only the text is
    shown. what: the work, such as "exporting". text: shown in place of `what`, if not "". job: the job whose time is estimated, or
    "" for `what`.
    """
    if not total:
        say(text or what)
        return
    share = min(1.0, max(0.0, done / total))
    _pace.follow(job or what, share)
    left = _pace.seconds_left
    filled = round(_BAR * share)
    shown = f"{text or what} {100 * share:3.0f} % [{'#' * filled:.<{_BAR}}]"
    say(shown + (f" {time_left(left)} left" if left is not None else ""))


def say_count(what: str, done: int, total: int | None) -> None:
    """Show progress with its numbers, as in `causes: 3 of 40`. total: None if unknown."""
    say_share(what, done, total or 0, f"{what}: {done} of {total}" if total else f"{what}: {done}")


def say_progress(run: str, done: int, total: int) -> None:
    """Show how much of a measurement is done. run: the model that is running, such as "reference"."""
    say_share(f"measuring: {run}", done, total, job="measuring")


class UnwrittenFiles:
    """Reports files that can't be written after something was measured, so that a command still prints what it measured."""

    def __init__(self) -> None:
        self.status = 0
        """BAD_INPUT if a file was not written."""

    def add(self, reason: str) -> None:
        """Print why a file was not written."""
        _last_line(f"dtype-engine: {reason}")
        self.status = BAD_INPUT

    @contextlib.contextmanager
    def reported(self) -> Iterator[None]:
        """A context manager that prints the UserError of its block."""
        try:
            yield
        except UserError as error:
            self.add(str(error))


_REPEATED = (signal.SIGXCPU, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF)
"""Signals that the system may send again every second or oftener. After the first, the program must still remove its files."""
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, *_REPEATED)
"""Signals that end a process by default. SIGINT is Python's own; the others that can be handled say that the program crashed."""


class _EndedBySignal(KeyboardInterrupt):
    """Raised if the signal `number` asks this program to end."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextlib.contextmanager
def _raised_signals() -> Iterator[None]:
    """A context manager in which `ENDING_SIGNALS` raise `_EndedBySignal`, unless they are ignored, as under nohup. A second SIGQUIT
    ends the process at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can set handlers
        return

    def end(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGQUIT:
            signal.signal(number, signal.SIG_DFL)
        elif number in _REPEATED:
            signal.signal(number, signal.SIG_IGN)
        raise _EndedBySignal(number)

    ours = [number for number in ENDING_SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in ours:
            signal.signal(number, end)
        yield
    finally:
        for number in ours:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)


def run(command: click.Command, program: str, arguments: Sequence[str] | None = None) -> int:
    """Run a click command and return its exit status. program: the name in messages. arguments: None means this process's."""
    fill_closed()
    replace_unusable_encodings()
    try:
        with own_output():
            return _status(command, program, arguments)
    finally:
        drop_unwritten()


def _status(command: click.Command, program: str, arguments: Sequence[str] | None) -> int:
    try:
        with _raised_signals():
            if os.environ.get("HF_ENDPOINT"):
                from dtype_engine.checkpoint.hub_reader import refuse_unreadable_address

                refuse_unreadable_address(os.environ["HF_ENDPOINT"])
            result = command.main(args=arguments, prog_name=program, standalone_mode=False)
            sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except (UserError, click.ClickException) as error:
        text = _of_click(error) if isinstance(error, click.ClickException) else str(error)
        sentence = " ".join(text.split())
        if "--sarif" in (sys.argv if arguments is None else arguments):  # a code host shows why there are no results
            from dtype_engine.reports.sarif import failure

            with contextlib.suppress(ReaderGone):
                print_json(failure(sentence))
        _last_line(f"{program}: {sentence}")
        return BAD_INPUT
    except (KeyboardInterrupt, click.Abort) as error:
        return _report_interrupted(program, error)
    except ReaderGone:
        return CLOSED_PIPE
    except Exception as error:
        # An interrupt while a lock is being acquired makes the release of the lock fail, and that error hides the interrupt.
        interrupt = next((link for link in _chain(error) if isinstance(link, KeyboardInterrupt)), None)
        return report_unexpected(program, error) if interrupt is None else _report_interrupted(program, interrupt)


def _of_click(error: click.ClickException) -> str:
    """Return the message of an error of click, which may quote an argument of any length: its middle is then left out."""
    text = error.format_message()
    return text if len(text) <= _LONGEST_OF_CLICK else f"{text[:_KEPT]} … {text[-_KEPT:]}"


def _report_interrupted(program: str, error: BaseException) -> int:
    cause = error if isinstance(error, _EndedBySignal) else error.__cause__  # click makes an `Abort` of it
    number = cause.number if isinstance(cause, _EndedBySignal) else signal.SIGINT
    name = "" if number == signal.SIGINT else f" by {signal.Signals(number).name}"
    _last_line(f"{program}: interrupted{name}")
    return 128 + number


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__


def report_unexpected(program: str, error: BaseException) -> int:
    """Print the line that `unexpected` returns, after the traceback if DTYPE_TUI_TRACEBACK is set. Returns the exit status."""
    if os.environ.get(TRACEBACK):
        traceback.print_exception(error)
    _last_line(f"{program}: {unexpected(error)}")
    return BAD_INPUT


def unexpected(error: BaseException) -> str:
    """Return one line about an error for which the program has no message of its own."""
    reason = exhausted(error)
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"can't read or write {printable(str(error.filename), 200)}: {reason or error.strerror}"
    if reason:
        return reason
    reason = one_line(error, 300, with_type=True)
    return f"unexpected {reason}; this is a fault of the program or of the file; {TRACEBACK}=1 shows where it arose"
