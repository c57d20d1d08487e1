"""Keeps track of requests that the engine has not answered yet and whose results will open a window."""

from __future__ import annotations

from dtype_engine.core.options import RunSettings
from dtype_engine.recipe import Recipe
from dtype_engine.service import events
from dtype_engine.service.commands import Command, Download, OpenOverMemory
from dtype_engine.service.jobs import VALUES, Ask, InspectTensor
from dtype_tui.state.controller import Controller

_INSPECTED = (
    "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "mxfp8", "mxfp4", "nvfp4", "int4@g128",
)  # fmt: skip


def inspect(tensor: str) -> Ask:
    """Return the command that asks for statistics of a tensor's values and the error of each cast."""
    return VALUES.ask(InspectTensor(tensor, _INSPECTED))


class AwaitedResults:
    """Prevents duplicate requests: a request that the engine has yet to answer is not sent again."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._pending: set[tuple[Command, Recipe, RunSettings]] = set()

    def ask(self, command: Command) -> None:
        """Send a command, unless the same one waits for its answer for the same recipe and settings."""
        experiment = self._controller.experiment
        key = (command, experiment.recipe, experiment.settings)
        if key in self._pending:
            return
        self._controller.ask(command)
        if self._controller.activity.busy:  # otherwise there is no engine, or the request was refused
            self._pending.add(key)

    def reset(self) -> None:
        """Forget all requests: their results will never come, or are of earlier inputs."""
        self._pending.clear()

    def take(self, event: events.Event) -> None:
        """Forget the requests that this event answers, or all if no answers will come."""
        match event:
            case events.JobDone():
                self._answered(event.ask)
            case events.ModelReady():
                self._answered(Download())
                self._answered(OpenOverMemory())
            case events.Idle() | events.EngineEnded() | events.Failed() | events.Refused() | events.Stopped():
                self.reset()

    def _answered(self, command: Command) -> None:
        self._pending = {key for key in self._pending if key[0] != command}
