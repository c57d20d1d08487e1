"""Turns the progress of one part of a job into the progress of the whole job."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial


def part_of(on_progress: Callable[[str, int, int], None], what: str, before: int, total: int) -> Callable[[int], None]:
    """Return a progress callback for one part of a job.

    When the callback is given the work done in the part, it calls `on_progress(what, done, total)` with the work done in the whole
    job. before: the work that the job had done when the part began.
    """
    return partial(_report, on_progress, what, before, total)


def _report(on_progress: Callable[[str, int, int], None], what: str, before: int, total: int, done: int) -> None:
    on_progress(what, before + done, total)
