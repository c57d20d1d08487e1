"""Runs a model's code or a library on a damaged file. Whatever it raises becomes an ordinary exception."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dtype_engine.core.errors import Cancelled, UserError, one_line
from dtype_engine.core.text import printable


class ExitCalled(RuntimeError):
    """Raised if foreign code calls `sys.exit`, `exit` or `quit`, or raises SystemExit itself."""


class LibraryPanic(RuntimeError):
    """Raised for an error other than SystemExit that `except Exception` does not catch, such as pyo3's PanicException from Rust."""


@contextmanager
def foreign_code() -> Iterator[None]:
    """A context manager that turns SystemExit into `ExitCalled`, and other errors that `except Exception` would not catch into
    `LibraryPanic`. KeyboardInterrupt stays as it is. A SystemExit would end this program without a message, and a panic would end
    the engine's thread.
    """
    try:
        yield
    except SystemExit as end:
        code = "" if end.code is None else repr(end.code)
        raise ExitCalled(f"the code called sys.exit({code})") from end
    except (Exception, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as panic:
        raise LibraryPanic(f"a library panicked: {one_line(panic)}") from panic


def with_type(error: BaseException) -> str:
    """Return an exception's type and message in one line, for code that the user wrote."""
    return one_line(error, 300, with_type=True)


def with_line(file: str | None) -> Callable[[BaseException], str]:
    """Return a function like `with_type` whose text also says which line of `file` (a `co_filename`) was running."""

    def described(error: BaseException) -> str:
        cause = error.__cause__ if isinstance(error, (ExitCalled, LibraryPanic)) else error
        frames = traceback.walk_tb(cause.__traceback__ if cause is not None else None)
        lines = [line for frame, line in frames if frame.f_code.co_filename == file]
        return with_type(error) + (f", in line {lines[-1]} of {printable(Path(str(file)).name)}" if lines else "")

    return described


@contextmanager
def failures_as(
    raised: type[UserError], what: str, reason: Callable[[BaseException], str] = one_line
) -> Iterator[None]:
    """A context manager that turns whatever foreign code raises into `raised`, with a message that begins with `what`.
    Libraries' exceptions for damaged files have no common class.

    UserErrors, cancellations and interrupts stay as they are. reason: returns an exception's message in one line.
    """
    try:
        with foreign_code():
            yield
    except (UserError, Cancelled):
        raise
    except MemoryError:
        raise raised(f"{what}: there is not enough memory for it") from None
    except Exception as error:
        raise raised(f"{what}: {reason(error)}") from error
