"""How far a job is, told by one of its parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial


def part_of(on_progress: Callable[[str, int, int], None], what: str, before: int, total: int) -> Callable[[int], None]:
    """A function of how much of the part `what` is done, which tells `on_progress(what, done, total)` of the whole job: `before`
    was done when the part began.
    """
    return partial(_tell, on_progress, what, before, total)


def _tell(on_progress: Callable[[str, int, int], None], what: str, before: int, total: int, done: int) -> None:
    on_progress(what, before + done, total)
