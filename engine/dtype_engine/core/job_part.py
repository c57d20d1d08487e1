"""Turns the progress of one stage of a job into the progress of the whole job."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial


def part_of(on_progress: Callable[[str, int, int], None], what: str, before: int, total: int) -> Callable[[int], None]:
    """Return a progress callback for one stage of a job.

    The callback's argument is the amount of work done in this stage. It calls `on_progress(what, done, total)`, where `done` also
    includes `before`, the work of earlier stages.
    """
    return partial(_report, on_progress, what, before, total)


def _report(on_progress: Callable[[str, int, int], None], what: str, before: int, total: int, done: int) -> None:
    on_progress(what, before + done, total)
