"""Runs code that this program does not control, such as a library that reads a damaged file, or a model's own code. Whatever the
code raises becomes an ordinary exception.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dtype_engine.core.errors import Cancelled, UserError, one_line
from dtype_engine.core.text import printable


class ExitCalled(RuntimeError):
    """Raised if code in a `foreign_code` block calls `sys.exit`, `exit` or `quit`, or raises SystemExit itself."""


class LibraryPanic(RuntimeError):
    """Raised if code in a `foreign_code` block raises any other exception that `except Exception` does not catch. An example is
    pyo3's PanicException, which a library in Rust raises for a damaged file.
    """


@contextmanager
def foreign_code() -> Iterator[None]:
    """A context manager for running foreign code. Exceptions that `except Exception` would not catch become an `ExitCalled` or a
    `LibraryPanic`; a KeyboardInterrupt is left as it is.

    Without this, a SystemExit in a model's code would end this program without a message, and with the exit status that the code
    chose, even 0 for success. A panic would end the engine's thread without a message.
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
    """Return an exception's type and message in one line. The type helps if the user wrote the code that failed."""
    return one_line(error, 300, with_type=True)


def with_line(file: str | None) -> Callable[[BaseException], str]:
    """Return a function like `with_type` whose text ends with the line of a Python file that was running, as in
    "KeyError: 'labels', in line 7 of metrics.py". file: the `co_filename` of the file's code.
    """

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
    """A context manager that turns whatever foreign code raises into an exception of the class `raised`, with a message that begins
    with `what`. This is needed because libraries' exceptions for damaged files and wrong values have no common class.

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
