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
    """A step of the tour, which teaches one action. The step ends when the user has performed the action. If the step then waits
    for the engine, it ends when `until` returns True.
    """

    words: str
    """The text to show before the action: what to press and why. `{undo}` is replaced by the key of the action `undo`."""
    actions: tuple[str, ...] = ()
    """Names of actions, one of which the user has to perform. If empty, the user has to close `window`."""
    window: str = ""
    """The window in which the step takes place, or "". If the user closes it, the tour goes back to the step that opens it."""
    opens: str = ""
    """The window that the action must open, or "". If it does not open, the action does not complete the step."""
    done: Condition = lambda experiment: True
    """A function that returns whether the action had the wanted effect. If it returns False right after the action, the step is not
    complete.
    """
    until: Condition = lambda experiment: True
    """A function that returns whether the engine has done what the step waits for after the action, such as a measurement. The next
    step begins only when it returns True.
    """
    meanwhile: str = ""
    """The text to show after the action while the step waits for `until`."""
    unless: Condition = lambda experiment: False
    """A function that returns whether the step is to be skipped."""


def _is_cast(experiment: Experiment) -> bool:
    return bool(experiment.recipe.rules)


def _is_measured(experiment: Experiment) -> bool:
    return experiment.results.report is not None or experiment.results.failure is not None


def _scan_has_begun(experiment: Experiment) -> bool:
    return experiment.scan.running or experiment.scan.finished


def _is_scanned(experiment: Experiment) -> bool:
    return experiment.scan.finished and experiment.scan.report is not None


_RUNS = "The model now runs in float32 and with the cast. The Drift pane compares the outputs."
STEPS = (
    Step(
        "A line is a module or a tensor: dtype, parameters, bytes, drift. Go to a layer with {move-next} and {move-previous}; "
        "{open} opens it, {close} closes it.",
        ("open", "open-or-close"),
    ),
    Step(
        "{cast-node-bfloat16} casts the node under the cursor to bfloat16: half the bytes. {cast-node-float16} casts to float16, "
        "{cast-node-stored} puts it back.",
        ("cast-node-bfloat16", "cast-node-float16"),
        done=_is_cast,
        until=_is_measured,
        meanwhile=_RUNS,
    ),
    Step(
        "Drift: the word in colour says what it means. SQNR measures the output's error in dB; higher is closer. {worst} goes to "
        "the module that drifts most.",
        ("worst",),
    ),
    Step("{undo} undoes the cast, {redo} applies it again.", ("undo",)),
    Step(
        "{cast} casts everything that a pattern matches. The prompt starts with the node's name.",
        ("cast",),
        opens="CastPrompt",
    ),
    Step(
        "Tab makes the pattern more general; the tree highlights what it matches. Enter casts that.",
        window="CastPrompt",
        done=_is_cast,
    ),
    Step(
        "{scan} scans: how much every weight matters in every dtype, estimated from a few passes.",
        ("scan",),
        opens="ScanSetup",
        unless=_scan_has_begun,
    ),
    Step("Enter scans in the marked dtypes.", window="ScanSetup", done=_scan_has_begun, unless=_scan_has_begun),
    Step(
        "The engine scans the model; all keys work meanwhile. {help} shows every key.",
        ("help",),
        opens="HelpScreen",
        until=_is_scanned,
        meanwhile="Esc closes the help. The scan continues; the status line shows its progress.",
    ),
    Step(
        "Esc closes the help. {optimise} opens the Pareto front: the recipe with the least predicted drift for each size.",
        ("optimise",),
        opens="OptimiseScreen",
    ),
    Step(
        "Left and Right walk along the front. Enter applies the point, with the rules that are listed, and measures it.",
        ("apply",),
        window="OptimiseScreen",
        until=_is_measured,
        meanwhile="Measured and predicted drift will stand side by side.",
    ),
    Step(
        "Esc closes the front; the rules stay applied. {leave-with} saves a checkpoint, a recipe or a report.",
        ("leave-with",),
        opens="SaveScreen",
    ),
    Step(
        "Down chooses the recipe, Enter writes it here: the rules and their measurement. Esc writes nothing.",
        window="SaveScreen",
    ),
    Step(
        "That is all. {help} lists every key, {quit} quits. `dtype-engine drift demo --recipe FILE` measures it in a script.",
        ("quit",),
    ),
)


class Tour:
    """The user's progress through the tour. key_of: returns the label of the key for an action, given the action's name."""

    def __init__(self, experiment: Experiment, key_of: Callable[[str], str]) -> None:
        self._experiment = experiment
        self._key_of = key_of
        self._acted = False
        self.index = 0
        """Index of the current step in `STEPS`."""

    @property
    def heading(self) -> str:
        return f"Tour {self.index + 1} of {len(STEPS)} · {self._key_of('tour')} leaves it"

    @property
    def words(self) -> str:
        """The text of the current step, with the names of the user's keys filled in."""
        step = STEPS[self.index]
        words = step.meanwhile if self._acted and step.meanwhile else step.words
        return re.sub(r"\{([\w-]+)\}", lambda found: self._key_of(found[1]), words)

    def acted(self, action: str, window: str) -> None:
        """Record an action of the user, whether by key, command or click. window: the open window, or "" if none is open."""
        step = STEPS[self.index]
        if name_of(action) in step.actions and window == (step.opens or window) and step.done(self._experiment):
            self._acted = True
        self.follow(window)

    def follow(self, window: str) -> None:
        """Go to the next step if the current one is complete. Go back to the step that opens the current step's window if that
        window was closed.
        """
        while self.index < len(STEPS) - 1:
            step = STEPS[self.index]
            if not step.actions and window != step.window and step.done(self._experiment):
                self._acted = True
            if not step.unless(self._experiment) and not (self._acted and step.until(self._experiment)):
                break
            self.index, self._acted = self.index + 1, False
        while not self._acted and STEPS[self.index].window not in ("", window):
            self.index -= 1
