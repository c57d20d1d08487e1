"""Decides which command runs next, and which commands are superseded, refused or dropped, by pure functions on a frozen queue.

Commands run in this order: new inputs, measurements, follow-ups of a measurement, and then all others in the order of arrival. A
newer recipe or newer inputs stop a running command that would come after them, except a save or a download. The stopped command
runs again later, unless it is superseded. A command that the user stops does not run again. The noise floor is measured when no
other command is waiting, and any other command stops it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from dtype_engine.core.options import RunSettings
from dtype_engine.recipe import Recipe
from dtype_engine.service.commands import (
    IDLE_RANK,
    ApplyRecipe,
    Cancel,
    Command,
    CountStoredLosses,
    FollowRecipe,
    Measure,
    Pause,
    Request,
    SetInputs,
    SetRecipe,
    SetSettings,
)
from dtype_engine.service.jobs import Ask
from dtype_engine.service.open_model import Available

MOST_ALIKE = 100
"""Maximum number of waiting commands that ask for the same job. Further ones are refused."""


@dataclass(frozen=True)
class Queue:
    """The running and the waiting commands, and the state that decides which runs next. `reported` clears the last three fields."""

    recipe: Recipe = field(default_factory=Recipe)
    settings: RunSettings = field(default_factory=RunSettings)
    available: Available = "opening"
    unavailable_reason: str = ""
    running: Command | None = None
    waiting: tuple[Command, ...] = (Measure(),)
    stopping: Literal["", "newer", "user"] = ""
    """Who stops the running command: a newer command or the user. "" if it is not being stopped."""
    failed: bool = False
    """Whether the last measurement ended with an error and therefore has no metrics."""
    in_full: bool = False
    """Whether the running measurement must run all inputs, as the user can request even while it runs."""
    paused: bool = False
    """Whether scans are paused."""
    stopped: str | None = None
    """The name of the command that the user stopped."""
    dropped: tuple[str, ...] = ()
    """The names of the commands that were waiting when the user stopped all commands."""
    refused: tuple[tuple[str, str], ...] = ()
    """The names of commands that can't run, each with the reason."""


def merge(queue: Queue, request: Request) -> Queue:
    """Return the queue after a request of the app, with a measurement if a new recipe or new settings need one."""
    match request:
        case SetRecipe():
            return _add(replace(queue, recipe=request.recipe), Measure())
        case FollowRecipe():
            measuring = any(isinstance(command, Measure) for command in (queue.running, *queue.waiting))
            changed = replace(queue, recipe=request.recipe)
            return _add(
                changed, Measure() if measuring or queue.failed or queue.available != "model" else ApplyRecipe()
            )
        case SetSettings():
            return _add(replace(queue, settings=request.settings), Measure(read_values=True))
        case Pause():
            return replace(queue, paused=request.paused)
        case Cancel():
            return _cancel(queue, request.name)
        case Measure(in_full=True) if isinstance(queue.running, Measure) and not queue.stopping:
            return replace(queue, in_full=True)
        case Command():
            return _add(queue, request)


def opened(queue: Queue, available: Available, reason: str = "") -> Queue:
    """Return the queue after opening the model. Waiting commands that need more than `available` are refused with `reason`."""
    result = replace(queue, available=available, unavailable_reason=reason, waiting=())
    for command in queue.waiting:
        result = _add(result, command)
    return result


def take(queue: Queue) -> Queue:
    """Return the queue after its first waiting command has become the running one."""
    running, *waiting = queue.waiting
    failed = queue.failed and not isinstance(running, Measure)
    in_full = isinstance(running, Measure) and running.in_full
    return replace(queue, running=running, waiting=tuple(waiting), stopping="", failed=failed, in_full=in_full)


def finish(
    queue: Queue, outcome: Literal["done", "failed", "interrupted"], follow_ups: Iterable[Command] = ()
) -> Queue:
    """Return the queue after the running command has ended. outcome: "interrupted" if the command was stopped halfway. follow_ups:
    further commands that complete the command.
    """
    running, by_user = queue.running, queue.stopping == "user"
    assert running is not None
    result = replace(queue, running=None, stopping="")
    if outcome == "failed":
        return replace(result, failed=result.failed or isinstance(running, Measure))
    if outcome == "interrupted":
        return replace(result, stopped=job_names(queue, (running,))[0]) if by_user else _put_back(result, running)
    for command in follow_ups:
        if by_user and (isinstance(command, Measure) or command.traits.follows):
            result = replace(result, stopped=result.stopped or command.name)
        else:
            result = _add(result, command)
    return result


def reported(queue: Queue) -> Queue:
    """Return the queue after the app was told of refused commands and, if no command runs, of stopped and dropped ones."""
    if queue.running is not None:
        return replace(queue, refused=())
    return replace(queue, stopped=None, dropped=(), refused=())


def job_names(queue: Queue, commands: Iterable[Command]) -> tuple[str, ...]:
    """Return the names by which the app shows and cancels these commands. A measurement that can only count values in the files
    is named as `CountStoredLosses`.
    """
    counts_only = queue.available == "files"
    return tuple(
        CountStoredLosses.traits.name if counts_only and isinstance(command, Measure) else command.name
        for command in commands
    )


def supersedes(newer: Command, older: Command) -> bool:
    """Return whether the waiting command `older` becomes superfluous when `newer` is added."""
    if isinstance(newer, Measure):
        return _is_of_measurement(older)
    return newer.traits.once and (type(newer), newer.name) == (type(older), older.name)


def _is_of_measurement(command: Command) -> bool:
    return isinstance(command, Measure | ApplyRecipe) or command.traits.follows


def _add(queue: Queue, command: Command) -> Queue:
    if queue.available == "nothing" or (queue.available == "files" and command.traits.needs_model):
        if _is_of_measurement(command):
            return queue  # the user did not request these by name, and already knows that the model is not open
        return replace(queue, refused=(*queue.refused, (command.name, queue.unavailable_reason)))
    if isinstance(command, Ask) and not command.traits.once:
        alike = sum(waiting.name == command.name for waiting in queue.waiting)
        if alike >= MOST_ALIKE:
            reason = f"{alike} {command.traits.too_many}"
            return replace(queue, refused=(*queue.refused, (command.name, reason)))
    measurements = [waiting for waiting in queue.waiting if isinstance(waiting, Measure)]
    if isinstance(command, Measure):
        read_values = command.read_values or any(measurement.read_values for measurement in measurements)
        command = Measure(read_values, command.in_full)
    elif any(supersedes(measurement, command) for measurement in measurements):
        return queue
    kept = (waiting for waiting in queue.waiting if not supersedes(command, waiting))
    running = queue.running
    stops = running is not None and (
        running.traits.rank == IDLE_RANK
        or (
            isinstance(command, SetInputs | Measure)
            and not running.traits.finishes
            and running.traits.rank >= command.traits.rank
        )
    )
    return replace(queue, waiting=_in_order((*kept, command)), stopping=queue.stopping or ("newer" if stops else ""))


def _put_back(queue: Queue, command: Command) -> Queue:
    if any(supersedes(waiting, command) for waiting in queue.waiting):
        return queue
    kept = (waiting for waiting in queue.waiting if not supersedes(command, waiting))
    return replace(queue, waiting=_in_order((command, *kept)))


def _in_order(commands: Iterable[Command]) -> tuple[Command, ...]:
    return tuple(sorted(commands, key=lambda command: command.traits.rank))


def _cancel(queue: Queue, name: str | None) -> Queue:
    stops = queue.running is not None and name in (None, *job_names(queue, (queue.running,)))
    changed = replace(
        queue, stopping="user" if stops else queue.stopping, paused=queue.paused and not stops and name is not None
    )
    if name is not None:
        return replace(
            changed, waiting=tuple(command for command in queue.waiting if job_names(queue, (command,)) != (name,))
        )
    requested = (command for command in queue.waiting if not command.traits.follows)
    return replace(changed, waiting=(), failed=False, dropped=(*queue.dropped, *job_names(queue, requested)))
