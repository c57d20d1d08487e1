"""What was asked of the engine for a window, and has not come."""

from __future__ import annotations

from collections.abc import Callable

from dtype_engine.recipe import Recipe
from dtype_engine.worker import events
from dtype_tui.state.controller import Controller


class AwaitedResults:
    """A key that opens a window once the engine has answered: pressed again before that, it asks no second time."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._asked: set[tuple[str, Recipe, str]] = set()

    def ask(self, what: str, ask: Callable[[], None]) -> None:
        """Call `ask`, unless the same is awaited with the same recipe and the same settings.

        what: a job, or "values of " and a tensor.
        """
        experiment = self._controller.experiment
        key = (what, experiment.recipe, str(experiment.settings))
        if key in self._asked:
            return
        ask()
        if self._controller.activity.busy:  # else there is nobody to answer
            self._asked.add(key)

    def reset(self) -> None:
        """What is asked now is another thing than before, or what was asked won't come."""
        self._asked.clear()

    def take(self, event: events.Event) -> None:
        """The engine tells something: it may be the answer, or that none comes."""
        match event:
            case events.ImplicitCastsTraced():
                self._answered("flow")
            case events.Generated():
                self._answered("generate")
            case events.SpeedMeasured():
                self._answered("speed")
            case events.WeightInspected():
                self._answered(f"values of {event.name}")
            case events.Idle() | events.EngineEnded() | events.Failed() | events.Refused() | events.Stopped():
                self.reset()

    def _answered(self, what: str) -> None:
        self._asked = {key for key in self._asked if key[0] != what}
