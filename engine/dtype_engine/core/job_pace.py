"""Estimates the remaining time of a job from its pace."""

from __future__ import annotations

import time
from collections.abc import Callable

_PACE_S = 2.0
_PACE_SHARE = 0.02
"""Fraction of a job that must be done, after `_PACE_S` seconds, before its remaining time is estimated."""
_LONG_S = 10.0
_LONG_SHARE = 0.005
"""The fraction that suffices after `_LONG_S` seconds. In a job of an hour, `_PACE_SHARE` takes more than a minute."""


class JobPace:
    """Estimates the remaining time of jobs that run one after another. clock: returns the time in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._job = ""
        self._share: float | None = None
        self._begun: tuple[float, float] | None = None
        """(seconds, fraction of the job done) when the running job first reported its progress."""

    def follow(self, job: str, share: float | None) -> None:
        """Record the fraction of a job that is done, None if it is unknown. A fraction below the last one counts as a new start."""
        if share is None:
            self._begun = None
        elif self._begun is None or job != self._job or share < (self._share or 0.0):
            self._begun = self._clock(), share
        self._job, self._share = job, share

    @property
    def seconds_left(self) -> float | None:
        """The job's remaining seconds at its pace until now, or None while the pace can't be estimated."""
        if self._begun is None or self._share is None:
            return None
        since, first = self._begun
        gone, done = self._clock() - since, self._share - first
        if gone < _PACE_S or done < (_PACE_SHARE if gone < _LONG_S else _LONG_SHARE):
            return None
        return gone * (1 - self._share) / done
