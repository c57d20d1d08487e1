"""Code that is not ours and calls `sys.exit`: an error of that code like any other, not the end of whoever runs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class ExitCalled(RuntimeError):
    """What ran in the block of `exits_as_errors` called `sys.exit`, `exit` or `quit`, or raised SystemExit by itself."""


@contextmanager
def exits_as_errors() -> Iterator[None]:
    """Within the block, which runs a model's code, a SystemExit becomes an `ExitCalled`.

    A SystemExit is no Exception: what turns errors of such code into sentences lets it by, and the program ends without a word,
    with the status that the code chose. 0 reads as a limit that was kept.
    """
    try:
        yield
    except SystemExit as end:
        code = "" if end.code is None else repr(end.code)
        raise ExitCalled(f"the code called sys.exit({code})") from end
