"""Estimates the remaining time of a job from its pace so far."""

from __future__ import annotations

import time
from collections.abc import Callable

_PACE_S = 2.0
_PACE_SHARE = 0.02
"""An estimate is given once a job has run for this many seconds and done this share of its work."""


class JobPace:
    """Follows jobs that run one after another, by the share of each that is done, from 0 to 1. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._job = ""
        self._share: float | None = None
        self._begun: tuple[float, float] | None = None
        """The time at which the share of the running job was first known, and that share."""

    def follow(self, job: str, share: float | None) -> None:
        """Note that `share` of a job is done; None if unknown. A share below the last one means that the job has restarted."""
        if share is None:
            self._begun = None
        elif self._begun is None or job != self._job or share < (self._share or 0.0):
            self._begun = self._clock(), share
        self._job, self._share = job, share

    @property
    def seconds_left(self) -> float | None:
        """The job's remaining time at its pace so far; None while that can't be estimated."""
        if self._begun is None or self._share is None:
            return None
        since, first = self._begun
        gone, done = self._clock() - since, self._share - first
        if gone < _PACE_S or done < _PACE_SHARE:
            return None
        return gone * (1 - self._share) / done
