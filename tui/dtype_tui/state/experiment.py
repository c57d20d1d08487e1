"""What the app knows: the model, the recipes gone through, and the results that belong to the one in force.

No widgets here and no torch: everything is looked up in, or asked of, the engine's torch-free rooms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dtype_engine.core.options import RunSettings
from dtype_engine.recipe import Plan, Recipe, RecipeHistory, Rule, explain_no_match, make_plan
from dtype_engine.recipe.regexes import shortened
from dtype_engine.results.thresholds import Thresholds
from dtype_engine.worker import events
from dtype_tui.rendering.hint_keys import with_keys
from dtype_tui.state.measurement_log import MeasuredRecipe, ModuleLog, measured, remember
from dtype_tui.state.results import Losses, Results, measured_modules
from dtype_tui.state.scan import ScanState

if TYPE_CHECKING:
    from dtype_engine.core.tree import Totals, Tree
    from dtype_engine.results.attribution import NoiseFloor
    from dtype_engine.results.drift import DriftReport, ModuleDrift
    from dtype_engine.results.inputs import InputsSummary
    from dtype_engine.results.memory import MemoryStats

OF_ANY_RECIPE = (events.SavingProgress, events.Saved, events.Stopped)
"""Events that name the recipe they were asked for with, and count whatever recipe is in force by now."""
_MOST_KNOWN = 10


@dataclass(frozen=True)
class ModelFacts:
    """What is known of the model, whatever the recipe."""

    title: str
    class_name: str = ""
    device: str = ""
    host: str = ""
    """The machine that the model is on; empty for this one."""
    inputs: str = ""
    """What it is run on, in words."""
    inputs_summary: InputsSummary | None = None
    """None until the user has named inputs."""
    no_forward: str | None = None
    """Why it can't be run."""
    live: bool = False
    """Whether the engine has it open."""
    has_tree: bool = True
    """False while nothing is known of its modules and tensors, and the tree is empty."""
    partial: bool = False
    """Only the first of a large checkpoint's headers are read so far: sums are not yet those of the model."""


@dataclass
class Experiment:
    """One model and one line of recipes. Results of another recipe than the one in force are never kept."""

    model: ModelFacts
    tree: Tree
    history: RecipeHistory = field(default_factory=RecipeHistory)
    settings: RunSettings = field(default_factory=RunSettings)
    thresholds: Thresholds = field(default_factory=Thresholds)
    plan: Plan = field(init=False)
    totals: Mapping[str, Totals] = field(init=False)
    results: Results = field(default_factory=Results)
    memory: MemoryStats | None = None
    floor: NoiseFloor | None = None
    measured: tuple[MeasuredRecipe, ...] = ()
    module_log: ModuleLog = field(default_factory=ModuleLog)
    baseline: MeasuredRecipe | None = None
    """The measured recipe that the tree and the panes compare with."""
    scan: ScanState = field(default_factory=ScanState)
    same_plan: bool = False
    """The last change of the recipe left every tensor's dtype as it was: what was measured is still true."""

    _prepared: tuple[Plan, Mapping[str, Totals]] | None = field(default=None, init=False)
    _known: dict[tuple[Recipe, RunSettings], DriftReport] = field(default_factory=dict, init=False)
    """The last measurements over all of these inputs: undo need not wait for one of them."""

    def __post_init__(self) -> None:
        self._replan()

    @property
    def recipe(self) -> Recipe:
        return self.history.recipe

    # -- the model -----------------------------------------------------------------------------------------------

    def set_model(self, ready: events.ModelReady) -> None:
        device = f"{ready.device} on {self.model.host}" if self.model.host else ready.device
        self.model = replace(
            self.model,
            class_name=ready.class_name,
            inputs=ready.inputs,
            device=device,
            no_forward=with_keys(ready.no_forward) if ready.no_forward else None,
            live=True,
        )
        self._known.clear()  # the model's code or files may be others
        self.replace_tree(ready.tree)

    def set_inputs(self, summary: InputsSummary) -> None:
        """The model is run on other inputs: what was measured before was not on these."""
        self.model = replace(self.model, inputs=summary.description, inputs_summary=summary, no_forward=None)
        self.floor = None
        self._known.clear()
        self.forget_figures()

    def prepare(self, tree: Tree) -> None:
        """Do what takes long of `replace_tree`, on the thread that brings the tree: no key waits for it."""
        plan = make_plan(tree, self.recipe)
        self._prepared = plan, tree.totals(plan.dtypes)
        assert tree.names  # listed here, so that the first frame of a filter need not

    def replace_tree(self, tree: Tree) -> None:
        """A tree that is complete takes the place of what was known before."""
        self.tree, self.model = tree, replace(self.model, has_tree=True, partial=False)
        self._replan()

    # -- the recipe and the settings in force --------------------------------------------------------------------

    def refusal(self, rule: Rule) -> str | None:
        """Why a rule is not put in force: it takes nothing in this model, or too long to match. None where it takes something, or
        where that is not known yet.
        """
        plan = make_plan(self.tree, self.recipe.then(rule))
        last = len(plan.recipe) - 1
        if last in plan.too_slow:
            return f"pattern {shortened(rule.pattern)} takes too long to match: simplify it"
        loading = not self.model.live and self.model.no_forward is None
        waits = loading and last in plan.pending_classes
        if self.model.partial or waits or plan.selections[last]:
            return None
        more = "; the model is still loading, and may have other names than its files" if loading else ""
        return explain_no_match(self.tree, rule.pattern, plan.selections[last]) + more

    def push(self, recipe: Recipe) -> bool:
        """Put a recipe in force; False when it already was."""
        return self._changed(self.history.push(recipe))

    def undo(self) -> bool:
        return self._changed(self.history.undo())

    def redo(self) -> bool:
        return self._changed(self.history.redo())

    def _changed(self, changed: bool) -> bool:
        if changed:
            self._replan(self.plan)
        return changed

    def restore(self, history: RecipeHistory) -> None:
        """Go on with the recipes of a session that was kept."""
        self.history = history
        self._replan()

    def _replan(self, before: Plan | None = None) -> None:
        """Plan the recipe in force. before: the plan of the same tree until now; the results stay where the new one is the same."""
        self.plan = make_plan(self.tree, self.recipe)
        self.same_plan = before is not None and before.dtypes == self.plan.dtypes and self.results.report is not None
        if self.same_plan:
            return
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared[0] is self.plan:
            self.totals = prepared[1]
        else:
            self.totals = self.tree.totals(self.plan.dtypes)
        self.results = Results()
        self._recall()

    def set_settings(self, settings: RunSettings) -> None:
        """Candidates run in another way: what was measured before is not theirs."""
        self.settings = settings
        self.scan.measured.clear()
        self.forget_figures()
        self._recall()

    def forget_figures(self) -> None:
        """The figures on the screen are no longer those of what is in force; which values the casts lose stays true."""
        self.results = Results(losses=self.results.losses)

    def _recall(self) -> None:
        """Show what was measured before of what is in force; it is measured again all the same."""
        if (known := self._known.get((self.recipe, self.settings))) is not None:
            self.results = replace(self.results, report=known, modules=measured_modules(known))

    # -- what the engine finds -----------------------------------------------------------------------------------

    def is_stale(self, event: events.Event) -> bool:
        """Whether an event belongs to another recipe or to other settings than those in force."""
        if isinstance(event, events.Measured | events.OutputMeasured) and event.settings != self.settings:
            return True
        recipe = getattr(event, "recipe", None)
        return recipe is not None and recipe != self.recipe and not isinstance(event, OF_ANY_RECIPE)

    def take(self, event: events.Event) -> None:
        """Keep what the engine has found out of the recipe in force; what only a window shows is not kept."""
        match event:
            case events.InputsReady():
                self.set_inputs(event.summary)
            case events.NoiseFloorMeasured():
                self.floor = event.floor
            case events.ScanUpdated():
                self.scan.set_report(self.tree, event.report, event.finished)
            case events.Memory():
                self.memory = event.stats
            case events.EngineEnded():
                self.memory = None  # of a process that is no more
            case events.RecipeMeasured():
                recipe = Recipe.of(map(Rule.parse, event.report.rules))
                self._keep(make_plan(self.tree, recipe), event.settings, event.report)
            case events.Idle() if self.scan.running:
                self.scan.stopped()
            case _:
                self._take_result(event)

    def _take_result(self, event: events.Event) -> None:
        """What belongs to the recipe in force."""
        results = self.results
        match event:
            case events.CastDone():
                self.results = replace(results, losses=Losses(event.lost, event.reason))
            case events.LossRemedyFound():
                self.results = replace(results, loss_remedy=event.found)
            case events.ModulesMeasured():
                newer = {module.name: module for module in event.modules}
                self.results = replace(results, modules={**results.modules, **newer})
            case events.OutputMeasured():
                partial = event.drift
                if results.report is None:
                    self.results = replace(results, partial_drift=partial)
                # The history has these figures until the rest is measured, if ever.
                about = self.recipe, self.settings, self.model.inputs, self.plan.planned_bytes
                self.measured = remember(self.measured, MeasuredRecipe(*about, partial.output, partial.extent))
            case events.Measured():
                self._set_report(event.report)
            case events.NonfiniteFound():
                self.results = replace(results, nonfinite=event.found)
            case events.AttributionReady():
                self.results = replace(results, causes=event.report)
            case events.Failed():
                self.results = replace(results, failure=with_keys(event.message), failed_module=event.module)

    def _set_report(self, report: DriftReport) -> None:
        self.results = replace(self.results, report=report, partial_drift=None, modules=measured_modules(report))
        self._keep(self.plan, self.settings, report)
        key = self.recipe, self.settings
        self._known.pop(key, None)
        if report.sequences.whole:
            self._known[key] = report
        for old in list(self._known)[:-_MOST_KNOWN]:
            del self._known[old]

    def _keep(self, plan: Plan, settings: RunSettings, report: DriftReport) -> None:
        """A recipe is measured, in force or not, on any inputs."""
        if plan.recipe == self.recipe or (settings, report.inputs) == (self.settings, self.model.inputs):
            self.scan.note_measured(self.tree, plan, report)
        entry = measured(report, plan.recipe, settings, plan.planned_bytes)
        self.measured = remember(self.measured, entry)
        self.module_log.keep(entry, report.modules)

    # -- comparing -----------------------------------------------------------------------------------------------

    def compare_with(self, entry: MeasuredRecipe) -> None:
        """Compare with a measured recipe from now on; with the same once more, with none."""
        self.baseline = None if self.is_baseline(entry) else entry

    def is_baseline(self, entry: MeasuredRecipe) -> bool:
        return self.baseline is not None and self.baseline.key == entry.key

    @property
    def baseline_modules(self) -> Mapping[str, ModuleDrift]:
        """The modules' drift of the recipe that is compared with; none where it was not kept."""
        return (self.module_log.of(self.baseline) or {}) if self.baseline is not None else {}

    @property
    def why_scan_is_stale(self) -> str:
        """Why the scan says nothing of what is run now, as the beginning of a sentence; "" where it does."""
        return self.scan.why_stale(self.model.inputs, self.settings)

    def predicted(self) -> str:
        """`1.2e-03 nats per token`: the drift of the recipe by the sum of its weights' scores; "" where there is nothing to say."""
        return "" if self.why_scan_is_stale else self.scan.predicted(self.tree, self.plan)
