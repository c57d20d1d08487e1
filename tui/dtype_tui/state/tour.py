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
    changes: bool = False
    """Whether the recipe must be another one than when the step began."""
    done: Condition = lambda experiment: True
    """Whether the action had the wanted effect, and nothing has undone it since. Otherwise, the step is not complete."""
    otherwise: str = ""
    """The text after the action has changed the recipe with another effect than the wanted one."""
    until: Condition = lambda experiment: True
    """Whether the engine has done what the step waits for after the action, such as a measurement."""
    meanwhile: str = ""
    """The text while the step waits for `until`. In the last step, the last words of the tour."""
    again: str = ""
    """The text if the engine has stopped before `until` holds. By default, the words of the step."""
    unless: Condition = lambda experiment: False
    """Whether the step is to be skipped."""
    needs: Condition = lambda experiment: True
    """Whether the step is possible. If not, the tour goes back to the step before."""


def _is_measured(experiment: Experiment) -> bool:
    return experiment.results.report is not None or experiment.results.failure is not None


def _has_figures(experiment: Experiment) -> bool:
    """Return whether some inputs are measured: on a busy machine, the other inputs take long."""
    return _is_measured(experiment) or experiment.results.partial_drift is not None


def _has_causes(experiment: Experiment) -> bool:
    """Return whether at least one module is measured, which can then be put back."""
    partial = experiment.results.partial_causes
    return experiment.results.causes is not None or (partial is not None and bool(partial.report.causes))


def _is_scanned(experiment: Experiment) -> bool:
    return experiment.has_scan


def _casts_layers(experiment: Experiment) -> bool:
    """Return whether at least a tenth of the layers' elements, such as one whole layer, has a dtype of 16 bits."""
    if _LAYERS not in experiment.tree.modules:
        return False
    elements = experiment.totals[_LAYERS].elements
    return 10 * (elements.get("bfloat16", 0) + elements.get("float16", 0)) >= sum(elements.values())


def _last_rule(experiment: Experiment) -> tuple[str, str]:
    """Return the pattern and the dtype of the last rule, or ("", "") if there are no rules."""
    rules = experiment.recipe.rules
    return (rules[-1].pattern, rules[-1].dtype) if rules else ("", "")


_LAYERS = "model.layers"
"""The module of the demo that holds its layers."""
_RUNS = "The model now runs in float32 and with the cast. The Drift pane compares the outputs."
_STOPPED = "The measurement has stopped: {measure} measures, and the tour goes on."
STEPS = (
    Step(
        "A line is a module or a tensor, or several layers that are alike. Go to the layers with {move-next}; "
        "{cast-node-bfloat16} casts them to bfloat16: half their bytes.",
        ("cast-node-bfloat16", "cast-node-float16"),
        changes=True,
        done=_casts_layers,
        otherwise="That cast something else than the layers: {undo} undoes it. Go to the layers, then {cast-node-bfloat16}.",
        until=_has_figures,
        meanwhile=_RUNS,
        again=_STOPPED,
    ),
    Step(
        "{cast} casts by a pattern: Tab makes it more general, the tree highlights what it matches, Enter casts that. {undo} "
        "undoes.",
        ("submit",),
        through=("CastPrompt",),
        leaves="",
        changes=True,
        done=lambda now: "*" in _last_rule(now)[0],
        otherwise="That pattern names a single node, without *. {cast} opens the line again: press Tab before Enter.",
        until=_is_measured,
        meanwhile=_RUNS,
        again=_STOPPED,
    ),
    Step(
        "{causes} finds the modules that the drift comes from: each runs as cast, all others as in the reference.",
        ("causes",),
        leaves="CausesScreen",
        until=_has_causes,
        meanwhile="Each module appears when it has been measured, the one with the most drift first.",
        again="The causes are not known yet: {causes} finds them.",
        needs=lambda now: bool(now.recipe.rules),
    ),
    Step(
        "x puts the module under the cursor back to float32, and says how many bytes that costs. Up and Down choose another.",
        ("put-back",),
        window="CausesScreen",
        changes=True,
        done=lambda now: _last_rule(now)[1] == "float32",
        until=_has_figures,
        meanwhile="The recipe now has a rule for this module. The model is measured again.",
        again=_STOPPED,
        needs=lambda now: bool(now.recipe.rules),
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
        again="The scan has stopped: {scan} resumes it.",
        unless=_is_scanned,
    ),
    Step(
        "{optimise} opens the Pareto front: the least predicted drift for each size. Left and Right walk, Enter applies the point.",
        ("apply",),
        leaves="OptimiseScreen",
        changes=True,
        until=_is_measured,
        meanwhile="Measured and predicted drift will stand side by side.",
        again=_STOPPED,
        needs=_is_scanned,
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
    """The user's progress through the tour. key_of: returns the label of an action's key. is_busy: whether the engine works."""

    def __init__(self, experiment: Experiment, key_of: Callable[[str], str], is_busy: Callable[[], bool]) -> None:
        self._experiment = experiment
        self._key_of = key_of
        self._is_busy = is_busy
        self._window = ""
        self._go_to(0)

    def _go_to(self, index: int) -> None:
        self.index = index
        self._acted = False
        self._before = self._experiment.recipe
        """The recipe when the step began."""

    @property
    def heading(self) -> str:
        return f"Tour {self.index + 1} of {len(STEPS)} · {self._key_of('tour')} leaves it"

    @property
    def words(self) -> str:
        """The text of the current step, with the user's keys. It says how to close a window that does not belong to the step."""
        step = STEPS[self.index]
        words, windows = step.words, ("", step.window, step.leaves, *step.through)
        if self._is_done:
            waits = self._is_busy() or step.until(self._experiment)
            words = (step.meanwhile if waits else step.again) or step.words
            windows = (self._window,) if waits else ("",)
        elif self._acted and self._experiment.recipe != self._before:
            words = step.otherwise or step.words
        if self._window not in windows:
            words = f"Esc closes this window. {words}"
        return re.sub(r"\{([\w-]+)\}", lambda found: self._key_of(found[1]), words)

    @property
    def _is_done(self) -> bool:
        """Whether the user has performed the step's action, and it had the wanted effect."""
        step, experiment = STEPS[self.index], self._experiment
        has_changed = experiment.recipe != self._before or not step.changes
        return self._acted and has_changed and step.done(experiment)

    def acted(self, action: str, window: str) -> None:
        """Record an action of the user. window: the class name of the open window, or ""."""
        step = STEPS[self.index]
        if name_of(action) in step.actions and step.leaves in (None, window):
            self._acted = True
        self.follow(window)

    def follow(self, window: str) -> None:
        """Go to the next step if this step is complete. Go back to a step that is possible if this one is not, since what it needs
        was undone, or its window was closed before the user acted. window: the open window's class name, or "".
        """
        self._window = window
        while self.index < len(STEPS) - 1:
            step = STEPS[self.index]
            if not step.unless(self._experiment) and not (self._is_done and step.until(self._experiment)):
                break
            self._go_to(self.index + 1)
        while not STEPS[self.index].needs(self._experiment) or (
            not self._is_done and STEPS[self.index].window and not window
        ):
            self._go_to(self.index - 1)
