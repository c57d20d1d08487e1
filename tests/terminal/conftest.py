"""Programs in pseudo-terminals, which end with their test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from tests.helpers.terminal import Opener, Terminal


@pytest.fixture
def opened() -> Iterator[Opener]:
    """Return a function that opens programs. Unless asked otherwise, they are forked from a process that has imported torch."""
    with contextlib.ExitStack() as made:
        yield lambda *arguments, forked=True, **settings: made.enter_context(
            Terminal(*arguments, forked=forked, **settings)
        )
