"""The tour: a step for each thing that one does with the program. A step waits for the key it teaches; all other keys work as
ever.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from dtype_tui.config.key_names import name_of
from dtype_tui.state.experiment import Experiment

Condition = Callable[[Experiment], bool]


@dataclass(frozen=True)
class Step:
    """words: what to press and why; `{undo}` stands for the key of the action of that name.

    The step is done when one of `actions` was done (without any: when `window` is closed) and `done` holds, and `opens` is open.
    It is over when `until` holds, too; that may take a while, and `meanwhile` says what is waited for. window: the step is about
    this one, and where that is not open, the step that opens it comes again. unless: there is nothing left to do.
    """

    words: str
    actions: tuple[str, ...] = ()
    window: str = ""
    opens: str = ""
    done: Condition = lambda experiment: True
    until: Condition = lambda experiment: True
    meanwhile: str = ""
    unless: Condition = lambda experiment: False


def _is_cast(experiment: Experiment) -> bool:
    return bool(experiment.recipe.rules)


def _is_measured(experiment: Experiment) -> bool:
    return experiment.results.report is not None or experiment.results.failure is not None


def _scan_has_begun(experiment: Experiment) -> bool:
    return experiment.scan.running or experiment.scan.finished


def _is_scanned(experiment: Experiment) -> bool:
    return experiment.scan.finished and experiment.scan.report is not None


_RUNS = "The model runs in float32 and as it is cast. The Drift pane compares what comes out."
STEPS = (
    Step(
        "A line is a module or a tensor: dtype, parameters, bytes, drift. Go to a layer with {move-next} and {move-previous}; "
        "{open} opens it, {close} closes it.",
        ("open", "open-or-close"),
    ),
    Step(
        "{cast-node-bfloat16} casts what the cursor is on to bfloat16: half the bytes. {cast-node-float16} is float16, "
        "{cast-node-stored} puts it back.",
        ("cast-node-bfloat16", "cast-node-float16"),
        done=_is_cast,
        until=_is_measured,
        meanwhile=_RUNS,
    ),
    Step(
        "Drift: the first line says what it means. SQNR is the output's error in dB; more is closer. {worst} goes to the module "
        "that drifts most.",
        ("worst",),
    ),
    Step("{undo} takes the cast back, {redo} makes it again.", ("undo",)),
    Step(
        "{cast} casts all that a pattern takes. The prompt begins with the node's name.", ("cast",), opens="CastPrompt"
    ),
    Step(
        "Tab makes the pattern more general; the tree lights up what it takes. Enter casts that.",
        window="CastPrompt",
        done=_is_cast,
    ),
    Step(
        "{scan} scans: how much every weight matters in every dtype, estimated from a few passes.",
        ("scan",),
        opens="ScanSetup",
        unless=_scan_has_begun,
    ),
    Step(
        "Enter scans in the dtypes that are marked.", window="ScanSetup", done=_scan_has_begun, unless=_scan_has_begun
    ),
    Step(
        "The model is scanned; all keys work meanwhile. {help} shows every key.",
        ("help",),
        opens="HelpScreen",
        until=_is_scanned,
        meanwhile="Esc closes the help. The status line says how far the scan is; it goes on.",
    ),
    Step(
        "Esc closes the help. {optimise} opens the front: for each size the recipe with the least predicted drift.",
        ("optimise",),
        opens="OptimiseScreen",
    ),
    Step(
        "Left and Right walk along the front. Enter puts the point in force, with the rules that are listed, and measures it.",
        ("apply",),
        window="OptimiseScreen",
        until=_is_measured,
        meanwhile="Measured and predicted drift will stand side by side.",
    ),
    Step(
        "Esc closes the front; the rules stay in force. {leave-with} leaves with something: a checkpoint, a recipe, a report.",
        ("leave-with",),
        opens="SaveScreen",
    ),
    Step(
        "Down chooses the recipe, Enter writes it here: the rules, and what was measured. Esc writes nothing.",
        window="SaveScreen",
    ),
    Step(
        "That is all. {help} has every key, {quit} quits. `dtype-engine drift demo --recipe FILE` measures the recipe in a job.",
        ("quit",),
    ),
)


class Tour:
    """Where in the tour somebody is. key_of: the key for an action by its name, as it stands on the keyboard."""

    def __init__(self, experiment: Experiment, key_of: Callable[[str], str]) -> None:
        self._experiment = experiment
        self._key_of = key_of
        self._acted = False
        self.index = 0
        """Of the step in `STEPS`."""

    @property
    def heading(self) -> str:
        return f"Tour {self.index + 1} of {len(STEPS)} · {self._key_of('tour')} leaves it"

    @property
    def words(self) -> str:
        """What the step says now."""
        step = STEPS[self.index]
        words = step.meanwhile if self._acted and step.meanwhile else step.words
        return re.sub(r"\{([\w-]+)\}", lambda found: self._key_of(found[1]), words)

    def acted(self, action: str, window: str) -> None:
        """This was done, by whatever key, command or click, and this window is open now ("" for none)."""
        step = STEPS[self.index]
        if name_of(action) in step.actions and window == (step.opens or window) and step.done(self._experiment):
            self._acted = True
        self.follow(window)

    def follow(self, window: str) -> None:
        """Go on, or back, to the step that things are at."""
        while self.index < len(STEPS) - 1:
            step = STEPS[self.index]
            if not step.actions and window != step.window and step.done(self._experiment):
                self._acted = True
            if not step.unless(self._experiment) and not (self._acted and step.until(self._experiment)):
                break
            self.index, self._acted = self.index + 1, False
        while not self._acted and STEPS[self.index].window not in ("", window):
            self.index -= 1
