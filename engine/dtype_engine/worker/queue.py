"""What is asked of the worker: jobs with a name, and the queue in which they wait. The worker's lock guards it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from dtype_engine.recipe import Recipe

JobName = Literal[
    "measure",
    "inputs",
    "recipe",
    "flow",
    "causes",
    "generate",
    "speed",
    "scan",
    "values",
    "write",
    "nonfinite",
    "losses",
    "floor",
]
"""`recipe` takes over one that casts as the one before it. Also names parts of a measurement that come after its figures, or
without them: `nonfinite` looks for why the output is not finite, `losses` for values that a cast loses, `floor` measures the
reference against itself."""
ONE_AT_A_TIME: tuple[JobName, ...] = ("flow", "causes", "generate", "speed", "scan")
"""Asked for again while it waits, such a job is still done once."""


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One thing to do for the recipe in force. `finishes`: a newer recipe or other inputs do not stop it, only the user does."""

    name: JobName
    run: Callable[[Recipe], None]
    finishes: bool = False


class JobQueue:
    """Jobs in the order in which they were asked for."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs)

    def add(self, job: Job) -> None:
        """Put it last; one that waits already, and is done once however often it is asked for, gives its place up."""
        if job.name in ONE_AT_A_TIME:
            self.remove(job.name)
        self._jobs.append(job)

    def put_back(self, job: Job) -> None:
        """Put a job that was interrupted first, unless it was asked for anew meanwhile."""
        if job.name not in ONE_AT_A_TIME or all(waiting.name != job.name for waiting in self._jobs):
            self._jobs.appendleft(job)

    def next(self) -> Job:
        """Take the first."""
        return self._jobs.popleft()

    def remove(self, name: str | None = None) -> tuple[JobName, ...]:
        """Drop the jobs of this name, or all of them; their names."""
        dropped = tuple(job.name for job in self._jobs if name in (None, job.name))
        self._jobs = deque(job for job in self._jobs if name not in (None, job.name))
        return dropped
