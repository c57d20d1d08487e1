"""How far a job is, as text."""

from __future__ import annotations

from typing import Protocol

from dtype_engine.core.units import time_left
from dtype_tui.rendering.cells import bar


class Progress(Protocol):
    """The share that is done, from 0 to 1, and the seconds that are left; each None where it is not known."""

    @property
    def share(self) -> float | None: ...
    @property
    def seconds_left(self) -> float | None: ...


def progress_words(job: Progress, width: int) -> str:
    """` 50 % ███      12 s left`: how far what runs is, with a bar of `width` cells; "" where that is not known."""
    share, left = job.share, job.seconds_left
    if share is None:
        return ""
    return f"{100 * share:3.0f} % {bar(share, width)}" + (f" {time_left(left)} left" if left is not None else "")
