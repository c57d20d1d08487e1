"""What was asked of the engine for a window, and has not come."""

from __future__ import annotations

from dtype_engine.core.options import RunSettings
from dtype_engine.recipe import Recipe
from dtype_engine.worker import events
from dtype_engine.worker.commands import CheckFiles, Command, Generate, InspectWeight, MeasureSpeed, TraceCasts
from dtype_tui.state.controller import Controller

GENERATE = Generate(tokens=48)

_INSPECTED = (
    "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "mxfp8", "mxfp4", "nvfp4", "int4@g128",
)  # fmt: skip


def inspect(tensor: str) -> InspectWeight:
    """Read a tensor's values, and compare them in other dtypes."""
    return InspectWeight(tensor, _INSPECTED)


class AwaitedResults:
    """A key that opens a window once the engine has answered: pressed again before that, it asks no second time."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._asked: set[tuple[Command, Recipe, RunSettings]] = set()

    def ask(self, command: Command) -> None:
        """Ask the engine, unless the same is awaited with the same recipe and the same settings."""
        experiment = self._controller.experiment
        key = (command, experiment.recipe, experiment.settings)
        if key in self._asked:
            return
        self._controller.ask(command)
        if self._controller.activity.busy:  # else there is nobody to answer
            self._asked.add(key)

    def reset(self) -> None:
        """What is asked now is another thing than before, or what was asked won't come."""
        self._asked.clear()

    def take(self, event: events.Event) -> None:
        """The engine tells something: it may be the answer, or that none comes."""
        match event:
            case events.ImplicitCastsTraced():
                self._answered(TraceCasts())
            case events.Generated():
                self._answered(GENERATE)
            case events.SpeedMeasured():
                self._answered(MeasureSpeed())
            case events.FilesChecked():
                self._answered(CheckFiles())
            case events.WeightInspected():
                self._answered(inspect(event.name))
            case events.Idle() | events.EngineEnded() | events.Failed() | events.Refused() | events.Stopped():
                self.reset()

    def _answered(self, command: Command) -> None:
        self._asked = {key for key in self._asked if key[0] != command}
