"""Converts the progress of one stage of a job into the progress of the whole job."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial


def part_of(on_progress: Callable[[str, int, int], None], what: str, before: int, total: int) -> Callable[[int], None]:
    """Return a progress callback for one stage of a job. Its argument is the amount of work done in this stage. It calls
    `on_progress(what, done, total)` with the amount done in the whole job.

    what: a text that is passed on unchanged. before: the amount of work in earlier stages. total: the amount of work in the job.
    """
    return partial(_report, on_progress, what, before, total)


def _report(on_progress: Callable[[str, int, int], None], what: str, before: int, total: int, done: int) -> None:
    on_progress(what, before + done, total)
