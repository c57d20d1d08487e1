"""What the app knows: the tree, the recipes gone through, and the readings that belong to the one in force.

No widgets here and no torch: everything is looked up in, or asked of, the engine's torch-free rooms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dtype_engine.core.options import RunSettings
from dtype_engine.recipe import (
    Plan,
    Recipe,
    RecipeHistory,
    Rule,
    RuleEffect,
    explain_no_match,
    make_plan,
    select,
    tensor_bytes,
)
from dtype_engine.results.thresholds import Thresholds
from dtype_engine.worker import events
from dtype_tui.rendering.loss_text import loss_marks
from dtype_tui.state.measurement_log import ModuleLog, measured, measured_in_part, remember
from dtype_tui.state.preview import Preview, preview
from dtype_tui.state.scan import ScanState, figure

if TYPE_CHECKING:
    from dtype_engine.core.tree import TensorInfo, Totals, Tree
    from dtype_engine.results.attribution import AttributionReport, LossRemedy, NoiseFloor, NonFiniteDiagnosis
    from dtype_engine.results.drift import DriftReport, ModuleDrift, PartialDrift
    from dtype_engine.results.inputs import InputsSummary
    from dtype_engine.results.losses import ValueLoss
    from dtype_engine.results.memory import MemoryStats
    from dtype_tui.state.measurement_log import MeasuredRecipe

OF_ANY_RECIPE = (events.SavingProgress, events.Saved, events.Stopped)
"""Events that name the recipe they were asked for with, and count whatever recipe is in force by now."""
_MOST_KNOWN = 10


@dataclass
class Experiment:
    """One model and one line of recipes. Readings of another recipe than the one in force are never kept."""

    title: str
    tree: Tree
    history: RecipeHistory = field(default_factory=RecipeHistory)
    settings: RunSettings = field(default_factory=RunSettings)
    plan: Plan = field(init=False)
    totals: Mapping[str, Totals] = field(init=False)
    report: DriftReport | None = None
    partial_drift: PartialDrift | None = None
    """The output's drift so far, of a measurement that has no report."""
    modules: dict[str, ModuleDrift] = field(default_factory=dict)
    lost: tuple[ValueLoss, ...] | None = None
    """Weights whose cast loses values; None while that is not known."""
    lost_reason: str = ""
    """Why it is not known, where it will not be by itself."""
    loss_marks: Mapping[str, str] = field(default_factory=dict)
    """What the tree says of a node that loses values."""
    loss_remedy: LossRemedy | None = None
    failed_module: str | None = None
    failure: str | None = None
    memory: MemoryStats | None = None
    class_name: str = ""
    device: str = ""
    host: str = ""
    """The machine that the model is on; empty for this one."""
    inputs: str = ""
    inputs_reading: InputsSummary | None = None
    no_forward: str | None = None
    live: bool = False
    thresholds: Thresholds = field(default_factory=Thresholds)
    floor: NoiseFloor | None = None
    nonfinite: NonFiniteDiagnosis | None = None
    causes: AttributionReport | None = None
    measured: list[MeasuredRecipe] = field(default_factory=list)
    module_log: ModuleLog = field(default_factory=ModuleLog)
    baseline: MeasuredRecipe | None = None
    """The measured recipe that the tree and the panes compare with."""
    scan: ScanState = field(default_factory=ScanState)
    has_tree: bool = True
    """False: nothing is known of the model yet, and `tree` is empty."""
    partial: bool = False
    """Only the first of a large checkpoint's headers are read so far: sums are not yet those of the model."""
    same_plan: bool = False
    """The last change of the recipe left every tensor's dtype as it was: what was measured is still true."""

    _prepared: tuple[Plan, Mapping[str, Totals]] | None = field(default=None, init=False)
    _known: dict[tuple[tuple[str, ...], str], DriftReport] = field(default_factory=dict, init=False)
    """The last measurements over all of these inputs, by rules and settings: undo need not wait for one of them."""

    def __post_init__(self) -> None:
        self._replan()

    @property
    def recipe(self) -> Recipe:
        """The recipe in force."""
        return self.history.recipe

    def _replan(self, before: Plan | None = None) -> None:
        """Plan anew. `before`: the plan of the same tree until now; the readings are kept where the new one is the same."""
        self.plan = make_plan(self.tree, self.recipe)
        self.same_plan = before is not None and before.dtypes == self.plan.dtypes and self.report is not None
        if self.same_plan:
            return
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared[0] is self.plan:
            self.totals = prepared[1]
        else:
            self.totals = self.tree.totals(self.plan.dtypes)
        self.lost, self.lost_reason, self.loss_marks = None, "", {}
        self.forget_readings()
        self._recall()

    def _recall(self) -> None:
        """Show what was measured before of what is in force; it is measured anew all the same."""
        if (known := self._known.get(self._key())) is not None:
            self.report, self.modules = known, {reading.name: reading for reading in known.modules}

    def _key(self) -> tuple[tuple[str, ...], str]:
        return tuple(map(str, self.recipe.rules)), str(self.settings)

    def set_settings(self, settings: RunSettings) -> None:
        """Candidates run in another way: what was read before is not theirs."""
        self.settings = settings
        self.scan.measured.clear()
        self.forget_readings()
        self._recall()

    def set_model(self, ready: events.ModelReady) -> None:
        """The live model is there."""
        self.class_name, self.inputs = ready.class_name, ready.inputs
        self.device = f"{ready.device} on {self.host}" if self.host else ready.device
        self.no_forward, self.live = ready.no_forward, True
        self._known.clear()  # the model's code or files may be others
        self.replace_tree(ready.tree)

    def set_inputs(self, reading: InputsSummary) -> None:
        """The model is run on other inputs: what was read before was not on these."""
        self.inputs, self.inputs_reading, self.no_forward = reading.description, reading, None
        self.floor = None
        self._known.clear()
        self.forget_readings()

    def is_stale(self, event: events.Event) -> bool:
        """Whether an event belongs to another recipe or to other settings than those in force."""
        if isinstance(event, events.Measured) and event.report.settings != str(self.settings):
            return True
        if isinstance(event, events.OutputMeasured) and event.settings != str(self.settings):
            return True
        recipe = getattr(event, "recipe", None)
        return recipe is not None and recipe != self.recipe and not isinstance(event, OF_ANY_RECIPE)

    def take(self, event: events.Event) -> None:
        """Keep what the engine has found out of the recipe in force; what only a window shows is not kept."""
        match event:
            case events.InputsReady():
                self.set_inputs(event.reading)
            case events.NoiseFloorMeasured():
                self.floor = event.floor
            case events.ScanUpdated():
                self.scan.set_report(self.tree, event.report, event.finished)
            case events.Memory():
                self.memory = event.reading
            case events.EngineEnded():
                self.memory = None  # of a process that is no more
            case events.CastDone():
                self.set_lost(event.lost, event.reason)
            case events.LossRemedyFound():
                self.loss_remedy = event.found
            case events.ModulesMeasured():
                self.modules.update((reading.name, reading) for reading in event.modules)
            case events.OutputMeasured():
                self.set_partial(event.reading)
            case events.Measured():
                self.set_report(event.report)
            case events.RecipeMeasured():
                self._keep(make_plan(self.tree, Recipe.of(map(Rule.parse, event.report.rules))), event.report)
            case events.NonfiniteFound():
                self.nonfinite = event.found
            case events.AttributionReady():
                self.causes = event.report
            case events.Idle() if self.scan.running:
                self.scan.stopped()

    def set_partial(self, reading: PartialDrift) -> None:
        """The recipe in force is measured in part. The history has that until the rest is measured, if ever."""
        if self.report is None:
            self.partial_drift = reading
        rules, settings = tuple(map(str, self.recipe.rules)), str(self.settings)
        new = measured_in_part(reading.output, reading.extent, rules, settings, self.inputs, self.plan.planned_bytes)
        remember(self.measured, new)

    def set_report(self, report: DriftReport) -> None:
        """The recipe in force is measured."""
        self.report, self.partial_drift = report, None
        self.modules = {reading.name: reading for reading in report.modules}
        self._keep(self.plan, report)
        self._known.pop(key := self._key(), None)
        if report.sequences.whole:
            self._known[key] = report
        for old in list(self._known)[:-_MOST_KNOWN]:
            del self._known[old]

    def _keep(self, plan: Plan, report: DriftReport) -> None:
        """A recipe is measured, in force or not, on any inputs."""
        if plan is self.plan or (report.settings, report.inputs) == (str(self.settings), self.inputs):
            self.scan.note_measured(self.tree, plan, report)
        self.module_log.keep_report(remember(self.measured, measured(report, plan.planned_bytes)), report)

    def compare_with(self, entry: MeasuredRecipe) -> None:
        """Compare with a measured recipe from now on; with the same once more, with none."""
        self.baseline = None if self.is_baseline(entry) else entry

    def is_baseline(self, entry: MeasuredRecipe) -> bool:
        """Whether this is the measurement that is compared with."""
        return self.baseline is not None and self.baseline.key == entry.key

    @property
    def baseline_modules(self) -> Mapping[str, ModuleDrift]:
        """The modules' drift of the recipe that is compared with; none where it was not kept."""
        return (self.module_log.of(self.baseline) or {}) if self.baseline is not None else {}

    def forget_readings(self) -> None:
        """The figures on the screen are no longer those of what is in force."""
        self.report, self.partial_drift, self.modules = None, None, {}
        self.failed_module = self.failure = None
        self.nonfinite = self.causes = self.loss_remedy = None

    def set_lost(self, losses: tuple[ValueLoss, ...] | None, reason: str) -> None:
        """What the casts of the recipe in force lose is known, or why it is not."""
        self.lost, self.lost_reason = losses, reason
        self.loss_marks = loss_marks(losses or ())

    def prepare(self, tree: Tree) -> None:
        """Do what takes long of `replace_tree`, on the thread that brings the tree: no key waits for it."""
        plan = make_plan(tree, self.recipe)
        self._prepared = plan, tree.totals(plan.dtypes)
        assert tree.names  # listed here, so that the first frame of a filter need not

    def replace_tree(self, tree: Tree) -> None:
        """A tree that is complete takes the place of what was known before."""
        self.tree, self.has_tree, self.partial = tree, True, False
        self._replan()

    def restore(self, history: RecipeHistory) -> None:
        """Go on with the recipes of a session that was kept."""
        self.history = history
        self._replan()

    def worst_modules(self, count: int | None = None) -> list[ModuleDrift]:
        """Modules that drift most, those with non-finite outputs first; none where nothing differs."""
        from dtype_engine.results.drift import worst_modules  # not for the first paint

        return worst_modules(self.modules.values())[:count]

    @property
    def loss_remedy_next(self) -> bool:
        """Whether the key for what mends applies the rules that keep values: what makes an output finite comes before them."""
        return self.nonfinite is None or self.nonfinite.remedy is None

    @property
    def why_scan_is_stale(self) -> str:
        """Why the scan says nothing of what is run now, as the beginning of a sentence; "" where it does."""
        report = self.scan.report
        if report is not None and report.inputs != self.inputs:
            return "the inputs are others than those of the scan"
        if report is not None and report.activations != self.settings.quantize_activations:
            were = "as they are" if report.activations == "none" else "quantised"
            return f"activations were {were} in the scan, and are not now"
        return ""

    def predicted(self) -> str:
        """`1.2e-03 nats per token`: the drift of the recipe by the sum of its weights' scores; "" where there is nothing to say."""
        prediction = self.scan.prediction(self.tree, self.plan)
        if prediction is None or not self.recipe.rules or self.why_scan_is_stale:
            return ""
        drift = "not finite" if math.isinf(prediction.value) else figure(prediction.value)
        return f"{drift} {prediction.unit}" + ("" if self.scan.finished else ", scan under way")

    def push(self, recipe: Recipe) -> bool:
        """Put a recipe in force; False when it already was."""
        if not self.history.push(recipe):
            return False
        self._replan(self.plan)
        return True

    def undo(self) -> bool:
        if not self.history.undo():
            return False
        self._replan(self.plan)
        return True

    def redo(self) -> bool:
        if not self.history.redo():
            return False
        self._replan(self.plan)
        return True

    def tensor(self, name: str) -> TensorInfo | None:
        """The tensor of this name, or the one that a tied name stands for."""
        return self.tree.canonical(name)

    def tensor_names(self, node: str) -> list[str]:
        """Canonical names of the tensors at or below a node."""
        if node in self.tree.modules:
            return [tensor.name for tensor in self.tree.below(node)]
        found = self.tensor(node)
        return [found.name] if found else []

    def planned_bytes(self, tensor: TensorInfo) -> int:
        """Bytes of one tensor under the recipe in force."""
        return tensor_bytes(tensor, self.plan.dtypes[tensor.name])

    def rules_within(self, node: str) -> tuple[list[int], list[int]]:
        """Indices of the rules that take something of a node: those that take nothing else, and those that reach
        beyond.
        """
        here = set(self.tensor_names(node))
        inside: list[int] = []
        beyond: list[int] = []
        for index, taken in enumerate(self.plan.selections):
            touched = set(taken.tensors)
            if touched & here:
                (inside if touched <= here else beyond).append(index)
        return inside, beyond

    def explain(self, node: str) -> list[RuleEffect]:
        """What the rules that take something of a node do to that, the last rule first."""
        effects = self.plan.effects(self.tree, set(self.tensor_names(node)))
        return [effect for effect in effects if effect.tensors][::-1]

    def cast_nodes(self) -> list[str]:
        """The topmost nodes that are cast as a whole: whose every castable tensor is planned in another dtype than stored."""
        castable, changed = [0], [0]
        for tensor in self.tree.order:
            castable.append(castable[-1] + tensor.castable)
            changed.append(changed[-1] + (self.plan.dtypes[tensor.name] != tensor.dtype))
        found: list[str] = []
        stack = [self.tree.root]
        while stack:
            node = stack.pop()
            here = changed[node.end] - changed[node.first]
            if here and here == castable[node.end] - castable[node.first]:
                found.append(node.name)
            elif here:
                prefix = f"{node.name}." if node.name else ""
                found += [
                    tensor.name
                    for local, tensor in node.tensors.items()
                    if tensor.name == prefix + local and self.plan.dtypes[tensor.name] != tensor.dtype
                ]
                stack.extend(reversed(node.children.values()))
        return found

    def preview(self, rule: Rule) -> Preview:
        """What a rule would take, and the bytes of that before and after. Raises TooSlow rather than hold up the keys."""
        return preview(self.tree, self.plan.dtypes, rule)

    def refusal(self, rule: Rule) -> str | None:
        """Why a rule is not put in force: it takes nothing in this model. None where it does, or where that is not known yet.

        Raises PatternError for a pattern that takes too long to match.
        """
        loading = not self.live and self.no_forward is None
        waits = rule.pattern.startswith("type:") and not self.tree.has_classes and loading
        if self.partial or waits:
            return None
        taken = select(self.tree, rule.pattern)
        if taken:
            return None
        more = "; the model is still loading, and may have other names than its files" if loading else ""
        return explain_no_match(self.tree, rule.pattern, taken) + more

    def not_kept_in_fp32(self, index: int) -> list[str]:
        """Modules that the model wants kept in float32 and that the rule at `index` now holds in less."""
        names = set(self.plan.selections[index].tensors)
        return [
            module.name
            for module in self.tree.modules.values()
            if module.keep_in_fp32
            and any(
                tensor.name in names
                and self.plan.decided_by.get(tensor.name) == index
                and self.plan.dtypes[tensor.name] not in ("float32", "float64", tensor.dtype)
                for tensor in module.tensors.values()
            )
        ]
