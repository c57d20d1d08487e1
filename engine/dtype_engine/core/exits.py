"""Turns a call of `sys.exit` in a model's code into an ordinary error, because the call would end this program."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class ExitCalled(RuntimeError):
    """Raised if code in an `exits_as_errors` block calls `sys.exit`, `exit` or `quit`, or raises SystemExit itself."""


@contextmanager
def exits_as_errors() -> Iterator[None]:
    """Turn a SystemExit that a model's code raises in the block into an `ExitCalled`.

    `except Exception` does not catch SystemExit, so it would end the program without a message, with a status that the model's code
    chose. Status 0 would then wrongly mean that the user's limit was met.
    """
    try:
        yield
    except SystemExit as end:
        code = "" if end.code is None else repr(end.code)
        raise ExitCalled(f"the code called sys.exit({code})") from end
