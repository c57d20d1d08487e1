"""The result of a job, for the function that makes a window for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

if TYPE_CHECKING:
    from dtype_tui.state.experiment import Experiment

Parameters = TypeVar("Parameters")
Result = TypeVar("Result")


class Answer(msgspec.Struct, Generic[Parameters, Result], frozen=True):
    """The result of a job for the current recipe."""

    result: Result
    parameters: Parameters
    """What the job was asked with; None for a job without parameters."""
    experiment: Experiment
    width: int
    """The width of the screen in cells."""
