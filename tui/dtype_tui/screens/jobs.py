"""The window with the running job and the waiting ones, in which the user can stop any of them."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType

from dtype_tui.config.questions import row_of
from dtype_tui.screens.choice import ChoiceScreen
from dtype_tui.state.controller import Controller


class JobsScreen(ChoiceScreen[None]):
    """Lists the running job, then the waiting jobs in the order in which they will run."""

    HEADING = "Jobs of the engine"
    KEYS = "↑↓ choose  x stops it  Esc closes"

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "The job above"),
        Binding("down,j", "move(1)", "The job below"),
        Binding("x,delete", "stop", "Stop this job; other jobs continue"),
        Binding("escape,q,enter,J", "leave", "Close"),
    ]

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._activity = controller.activity
        super().__init__(len(self._jobs()))

    def _jobs(self) -> list[str]:
        activity = self._activity
        return [activity.running, *activity.waiting] if activity.busy else []

    def show_figures(self) -> None:
        self.redraw()

    def draw(self) -> Text:
        jobs = self._jobs()
        self._count = max(1, len(jobs))
        self.index = min(self.index, self._count - 1)
        text = Text()
        for index, name in enumerate(jobs):
            text.append(*self.marker(index))
            if index == 0:
                text.append(f"{self._activity.what}  {self._activity.progress_words(20)}\n", style="bold")
            else:
                text.append(f"next: {row_of(name).running}\n")
        if not jobs:
            text.append("No job is running or waiting.\n")
        text.right_crop(1)
        return text

    def action_stop(self) -> None:
        jobs = self._jobs()
        if jobs:
            self._controller.stop_job(jobs[self.index])
            self.redraw()
