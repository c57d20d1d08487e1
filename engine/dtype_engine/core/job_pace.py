"""How long a job will go on, guessed from its pace so far."""

from __future__ import annotations

import time
from collections.abc import Callable

_PACE_S = 2.0
_PACE_SHARE = 0.02
"""The pace of a job is told once it ran so long and did so much."""


class JobPace:
    """Follows one job after the other by the share of each that is done, from 0 to 1. clock: seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._job = ""
        self._share: float | None = None
        self._begun: tuple[float, float] | None = None
        """When the share of what runs was first known, and what it was."""

    def follow(self, job: str, share: float | None) -> None:
        """So much of this job is done; None: that is not known. One that has done less than before has begun anew."""
        if share is None:
            self._begun = None
        elif self._begun is None or job != self._job or share < (self._share or 0.0):
            self._begun = self._clock(), share
        self._job, self._share = job, share

    @property
    def seconds_left(self) -> float | None:
        """How long the job will go on at the pace so far; None while that can't be told."""
        if self._begun is None or self._share is None:
            return None
        since, first = self._begun
        gone, done = self._clock() - since, self._share - first
        if gone < _PACE_S or done < _PACE_SHARE:
            return None
        return gone * (1 - self._share) / done
