"""The tour: one step for each task of the program. A step waits for the key that it teaches; all other keys work as usual."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from dtype_tui.config.key_names import name_of
from dtype_tui.state.experiment import Experiment

Condition = Callable[[Experiment], bool]


@dataclass(frozen=True)
class Step:
    """A step of the tour, which teaches one task. It ends when the user has performed one of the actions and `until` holds."""

    words: str
    """What to press and why. `{undo}` is replaced by the key of the action `undo`."""
    actions: tuple[str, ...]
    """One of these actions has to be performed."""
    window: str = ""
    """The class name of the window in which the step begins, or "". If it is closed, the tour goes back to the step before."""
    through: tuple[str, ...] = ()
    """The class names of windows on the way to the action. In any other window, the text begins by telling how to close it."""
    leaves: str | None = None
    """The window that must be open after the action: its class name, "" for none, or None for any."""
    done: Condition = lambda experiment: True
    """Whether the action had the wanted effect. Called right after it. If False, the step is not complete."""
    until: Condition = lambda experiment: True
    """Whether the engine has done what the step waits for after the action, such as a measurement."""
    meanwhile: str = ""
    """The text while the step waits for `until`. In the last step, the last words of the tour."""
    unless: Condition = lambda experiment: False
    """Whether the step is to be skipped."""


def _is_measured(experiment: Experiment) -> bool:
    return experiment.results.report is not None or experiment.results.failure is not None


def _is_scanned(experiment: Experiment) -> bool:
    return experiment.scan.finished and experiment.scan.report is not None


_RUNS = "The model now runs in float32 and with the cast. The Drift pane compares the outputs."
STEPS = (
    Step(
        "A line is a module or a tensor, or several layers that are alike. Go to the layers with {move-next}; "
        "{cast-node-bfloat16} casts them to bfloat16: half the bytes.",
        ("cast-node-bfloat16", "cast-node-float16"),
        done=lambda now: bool(now.recipe.rules),
        until=_is_measured,
        meanwhile=_RUNS,
    ),
    Step(
        "{cast} casts by a pattern: Tab makes it more general, the tree highlights what it matches, Enter casts that. {undo} "
        "undoes.",
        ("submit",),
        through=("CastPrompt",),
        leaves="",
        done=lambda now: any("*" in rule.pattern for rule in now.recipe.rules),
        until=_is_measured,
        meanwhile=_RUNS,
    ),
    Step(
        "{causes} finds the modules that the drift comes from: each runs as cast, all others as in the reference.",
        ("causes",),
        leaves="CausesScreen",
        until=lambda now: now.results.causes is not None,
        meanwhile="Each module appears when it has been measured, the one with the most drift first.",
    ),
    Step(
        "x puts the module under the cursor back to float32, and says how many bytes that costs. Up and Down choose another.",
        ("put-back",),
        window="CausesScreen",
        done=lambda now: bool(now.recipe.rules) and now.recipe.rules[-1].dtype == "float32",
        until=_is_measured,
        meanwhile="The recipe now has a rule for this module. The model is measured again.",
    ),
    Step(
        "{history} lists the measured recipes, bytes against drift. Press c on one and c on another to compare them.",
        ("compare",),
        through=("MeasurementsScreen",),
        leaves="Overlay",
    ),
    Step(
        "{scan} scans: how much every weight matters in every dtype, estimated from a few passes. Enter starts the scan.",
        ("start",),
        through=("ScanSetup",),
        leaves="",
        until=_is_scanned,
        meanwhile="The engine scans the model; all keys work meanwhile. {help} shows every key.",
        unless=_is_scanned,
    ),
    Step(
        "{optimise} opens the Pareto front: the least predicted drift for each size. Left and Right walk, Enter applies the point.",
        ("apply",),
        leaves="OptimiseScreen",
        done=lambda now: not _is_measured(now),  # since the recipe has just changed
        until=_is_measured,
        meanwhile="Measured and predicted drift will stand side by side.",
    ),
    Step(
        "{leave-with} saves a checkpoint, a recipe or a report. Down chooses the recipe, Enter writes it.",
        ("write",),
        through=("SaveScreen",),
        leaves="",
        meanwhile="That is all. {help} lists every key, {quit} quits. `dtype-engine drift demo --recipe FILE` measures it in a "
        "script.",
    ),
)


class Tour:
    """The user's progress through the tour. key_of: returns the label of an action's key."""

    def __init__(self, experiment: Experiment, key_of: Callable[[str], str]) -> None:
        self._experiment = experiment
        self._key_of = key_of
        self._acted = False
        self._window = ""
        self.index = 0

    @property
    def heading(self) -> str:
        return f"Tour {self.index + 1} of {len(STEPS)} · {self._key_of('tour')} leaves it"

    @property
    def words(self) -> str:
        """The text of the current step, with the user's keys. It says how to close a window that does not belong to the step."""
        step = STEPS[self.index]
        words = step.meanwhile if self._acted and step.meanwhile else step.words
        if not self._acted and self._window not in ("", step.window, step.leaves, *step.through):
            words = f"Esc closes this window. {words}"
        return re.sub(r"\{([\w-]+)\}", lambda found: self._key_of(found[1]), words)

    def acted(self, action: str, window: str) -> None:
        """Record an action of the user. window: the class name of the open window, or ""."""
        step = STEPS[self.index]
        if name_of(action) in step.actions and step.leaves in (None, window) and step.done(self._experiment):
            self._acted = True
        self.follow(window)

    def follow(self, window: str) -> None:
        """Go to the next step if this step is complete. If this step's window was closed before the user acted, go back to a step
        that needs no window. window: the open window's class name, or "".
        """
        self._window = window
        while self.index < len(STEPS) - 1:
            step = STEPS[self.index]
            if not step.unless(self._experiment) and not (self._acted and step.until(self._experiment)):
                break
            self.index, self._acted = self.index + 1, False
        while not self._acted and STEPS[self.index].window and not window:
            self.index -= 1
