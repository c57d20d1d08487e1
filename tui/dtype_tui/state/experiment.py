"""The state of the app: the model, the history of recipes, and the current recipe's results. It uses neither widgets nor torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from dtype_engine.core.dtypes import STORED
from dtype_engine.core.options import RunSettings
from dtype_engine.core.regexes import shortened
from dtype_engine.core.tree import Totals
from dtype_engine.recipe import History, Plan, Recipe, Rule, explain_no_match, make_plan
from dtype_engine.recipe.serving_memory import (
    Load,
    cache_tensor_bytes,
    default_context,
    serving_dtype,
    serving_memory,
)
from dtype_engine.results.thresholds import Limit
from dtype_engine.service import events
from dtype_engine.service.jobs import ACTIVATIONS, CAUSES, FLOOR, KERNELS, LOSS_REMEDY, NONFINITE, SPEED, WEIGHTS
from dtype_tui.rendering.hint_keys import with_keys
from dtype_tui.state.measurement_log import MeasuredRecipe, ModuleLog, lost_counts, mark, measured, remember
from dtype_tui.state.results import Losses, Results
from dtype_tui.state.rule_list import RuleList
from dtype_tui.state.scan import ScanState
from dtype_tui.state.served import Served, add_cache_nodes

if TYPE_CHECKING:
    from dtype_engine.core.kv_cache import KVCacheTensor
    from dtype_engine.core.tree import NodeTotals, Tree
    from dtype_engine.results.attribution import NoiseFloor
    from dtype_engine.results.drift import DriftReport, ModuleDrift
    from dtype_engine.results.inputs import InputsSummary
    from dtype_engine.results.memory import MemoryStats
    from dtype_engine.results.scan import Prediction
    from dtype_engine.results.serving_memory import ServingMemory

OF_ANY_RECIPE = (events.SavingProgress, events.Saved, events.Stopped)
"""Events that are handled even if they belong to an earlier recipe."""
_MOST_MODULES_SIZE = 32 << 20
"""Maximum size, roughly in bytes, of the stored drift of modules."""
_MOST_OF_A_FAILURE = 2000
"""Maximum number of characters of the reason why a measurement failed."""
_MOST_KNOWN = 10
"""Maximum number of drift reports that are kept, for undo to show."""

_FIELDS = {
    CAUSES.name: "causes",
    SPEED.name: "speed",
    NONFINITE.name: "nonfinite",
    LOSS_REMEDY.name: "loss_remedy",
    KERNELS.name: "kernels",
}
"""The field of `Results` that stores the result of a job, by the job's name."""


class ModelFacts(msgspec.Struct, frozen=True):
    title: str
    class_name: str = ""
    device: str = ""
    host: str = ""
    """The machine that holds the model, or "" for this one."""
    inputs: str = ""
    inputs_summary: InputsSummary | None = None
    """The inputs on which the model runs. None until the engine has prepared them."""
    no_forward: str | None = None
    """Why the model can't run, or None if it can."""
    no_text: str | None = None
    """Why the model can't generate text. None if it can, or if this is not known."""
    memory_bytes: int | None = None
    """The memory of the model's device, or None while it is unknown."""
    live: bool = False
    """Whether the engine has loaded the model."""
    has_tree: bool = True
    """Whether the modules and tensors are known. Until then, the tree is empty."""
    path: Path | None = None
    """The path of the model, or None if this machine has no file of the model."""
    partial: bool = False
    """Whether only some headers of a large checkpoint are read, so that sums do not cover the whole model."""
    provenance: tuple[str, ...] = ()
    """Lines that say how the checkpoint was quantized, such as "written by dtype-tui"."""
    reference: str = "float32"
    """The reference of the drift: "float32", "as stored (bfloat16)", or the name of another checkpoint."""
    loader: str = "own"
    """The program that loads an export: "transformers", or "own" for dtype-engine alone."""


@dataclass
class Experiment:
    """One model, its history of recipes, and the results of the current recipe. Measurements of other recipes are in `measured`,
    `module_log` and `scan`.
    """

    model: ModelFacts
    tree: Tree
    history: History[RuleList] = field(default_factory=lambda: History(RuleList()))
    settings: RunSettings = field(default_factory=RunSettings)
    thresholds: tuple[Limit, ...] = ()
    plan: Plan = field(init=False)
    totals: NodeTotals = field(init=False)
    results: Results = field(default_factory=Results)
    before: DriftReport | None = None
    """The previous drift report on the same inputs. It is shown until the new drift is known, and then compared with it."""
    memory: MemoryStats | None = None
    served: Served = field(default_factory=Served)
    floor: NoiseFloor | None = None
    measured: tuple[MeasuredRecipe, ...] = ()
    module_log: ModuleLog = field(default_factory=ModuleLog)
    axis: str = ""
    """The user's own metric on the vertical axis of the plots of measured recipes, or "" for the drift."""
    baseline: MeasuredRecipe | None = None
    """The measured recipe with which the current one is compared."""
    scan: ScanState = field(default_factory=ScanState)
    same_plan: bool = False
    """Whether the last change of the recipe changed no tensor's dtype, so that the measurement stays valid."""

    _prepared: tuple[Plan, NodeTotals] | None = field(default=None, init=False)
    """The plan and the totals of each node that `prepare` has computed for the next call of `replace_tree`."""
    _known: dict[tuple[Recipe, RunSettings], Results] = field(default_factory=dict, init=False)
    """The latest results over all of the current inputs, by recipe and settings, which an undo shows at once."""

    def __post_init__(self) -> None:
        self.served.caches = add_cache_nodes(self.tree)
        self._replan()

    @property
    def tokens(self) -> int:
        """The tokens in each sequence of the KV caches whose bytes are shown."""
        return self.served.context or default_context(self.tree)

    @property
    def context_words(self) -> str:
        """The context for which KV caches are shown, such as `512 tokens × 3`."""
        return f"{self.tokens:,} tokens" + (f" × {self.served.batch}" if self.served.batch > 1 else "")

    def cache_totals(self, tensors: Iterable[KVCacheTensor], to: str | None = None) -> Totals:
        """Return the elements and bytes of KV cache tensors at the current context. to: the format of a rule for all of them, or
        None for those that they have under the recipe.
        """
        found, compute = Totals(), serving_dtype(self.totals[""], self.tree.kv_cache)
        for tensor in tensors:
            given = self.plan.caches.get(tensor.name, STORED) if to is None else to
            form = (tensor.state_dtype or compute) if given == STORED else given
            elements = tensor.elements(self.tokens, self.served.batch)
            found.add(form, elements, cache_tensor_bytes(tensor, form, self.tokens, self.served.batch))
        return found

    def serving(self) -> ServingMemory:
        """Return the memory that serving the model takes, at the current context."""
        served = self.served
        known = (self.plan, self.tokens, served.batch, served.budget, served.peaks)
        if served.known is None or served.known[0] != known:
            served.known = known, self._serving_under(self.plan, self.totals[""])
        return served.known[1]

    def _serving_under(self, plan: Plan, totals: Totals | None = None) -> ServingMemory:
        served = self.served
        return serving_memory(
            self.model.title,
            self.tree,
            plan,
            Load(self.tokens, served.batch),
            budget=served.budget,
            activations=served.activations if served.peaks and served.peaks[0].batch == served.batch else None,
            totals=totals,
        )

    @property
    def room(self) -> int | None:
        """The bytes in which the model must fit: the budget or, if there is none, the memory of the device. None if unknown."""
        return self.served.budget or self.model.memory_bytes

    def needed_bytes(self, plan: Plan) -> int:
        """Return the bytes that must fit in `room` under a plan: the weights and, with a budget, KV cache and activations."""
        return self._serving_under(plan).total_bytes if self.served.budget else plan.planned_bytes

    @property
    def rules(self) -> RuleList:
        """The rules of the current recipe, together with those that are disabled."""
        return self.history.current

    @property
    def recipe(self) -> Recipe:
        return self.rules.recipe

    # -- the model -----------------------------------------------------------------------------------------------

    def set_model(self, ready: events.ModelReady) -> None:
        device = f"{ready.device} on {self.model.host}" if self.model.host else ready.device
        self.model = replace(
            self.model,
            class_name=ready.class_name,
            inputs=ready.inputs,
            device=device,
            no_forward=with_keys(ready.no_forward) if ready.no_forward else None,
            no_text=ready.no_text,
            memory_bytes=ready.memory_bytes,
            live=True,
            provenance=ready.provenance,
            reference=ready.reference,
            loader=ready.loader,
        )
        self._known.clear()  # the model's code or files may have changed
        self.replace_tree(ready.tree)

    def set_inputs(self, summary: InputsSummary) -> None:
        """Record that the model now runs on other inputs, and drop the results on the previous ones."""
        self.model = replace(self.model, inputs=summary.description, inputs_summary=summary, no_forward=None)
        self.floor = None
        self._known.clear()
        self.forget_figures()
        self.before = None

    def prepare(self, tree: Tree) -> None:
        """Compute in advance what `replace_tree` needs for a new tree. This is slow, and runs on the thread that reads events."""
        plan = make_plan(tree, self.recipe)
        self._prepared = plan, tree.totals(plan.dtypes)
        add_cache_nodes(tree)
        assert tree.names  # computes the cached list of names, which the first frame of a filter needs

    def replace_tree(self, tree: Tree) -> None:
        self.tree, self.model = tree, replace(self.model, has_tree=True, partial=False)
        self.served.caches = add_cache_nodes(tree)
        self._replan()

    # -- the current recipe and settings -------------------------------------------------------------------------

    def refusal(self, rule: Rule) -> str | None:
        """Return why a rule is refused: it matches nothing in this model, or takes too long to match. None if the rule matches
        something, or may do so once the model is loaded.
        """
        plan = make_plan(self.tree, self.recipe.then(rule))
        last = len(plan.recipe) - 1
        if last in plan.too_slow:
            return f"pattern {shortened(rule.pattern)} takes too long to match: simplify it"
        loading = not self.model.live and self.model.no_forward is None
        waits = loading and last in plan.pending_classes
        if self.model.partial or waits or plan.selections[last]:
            return None
        more = "; the model is still loading, and its names may differ from those of its files" if loading else ""
        return explain_no_match(self.tree, rule.pattern, plan.selections[last], rule.dtype) + more

    def push(self, recipe: Recipe) -> bool:
        """Make a recipe the current one, without any disabled rules. Returns False if it already is."""
        return recipe != self.recipe and self.push_rules(RuleList.of(recipe.rules))

    def push_rules(self, rules: RuleList) -> bool:
        """Make a list of rules the current one. Returns False if it already is."""
        return self._follow(self.history.push(rules))

    def undo(self) -> bool:
        return self._follow(self.history.undo())

    def redo(self) -> bool:
        return self._follow(self.history.redo())

    def _follow(self, changed: bool) -> bool:
        """Plan again if enabled rules have changed. changed: whether any rules have changed, even disabled ones; it is also
        returned.
        """
        if self.recipe != self.plan.recipe:
            self._replan(self.plan)
        return changed

    def restore(self, history: History[RuleList]) -> None:
        self.history = history
        self._replan()

    def _replan(self, before: Plan | None = None) -> None:
        """Plan the current recipe. Drop the results unless `before`, the previous plan of the same tree, has the same dtypes."""
        self.plan = make_plan(self.tree, self.recipe)
        self.same_plan = before is not None and before.same_casts(self.plan) and self.results.report is not None
        if self.same_plan:
            return
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared[0] is self.plan:
            self.totals = prepared[1]
        else:
            self.totals = self.tree.totals(self.plan.dtypes)
        self._remember_shown()
        self.results = Results()
        self._recall()

    def _remember_shown(self) -> None:
        if self.results.report is not None:
            self.before = self.results.report

    def set_settings(self, settings: RunSettings) -> None:
        """Use these settings from now on, and drop the results for the previous settings."""
        self.settings = settings
        self.scan.measured.clear()
        self.forget_figures()
        self._recall()

    def forget_figures(self) -> None:
        """Drop the results of the current recipe, except for `losses`, which depends only on the weights."""
        self._remember_shown()
        self.results = Results(losses=self.results.losses)

    def _recall(self) -> None:
        """Show the latest known results of the current recipe and settings until the engine has measured them again."""
        if (known := self._known.get((self.recipe, self.settings))) is not None:
            self.results = replace(known, losses=self.results.losses)

    # -- results of the engine -----------------------------------------------------------------------------------

    def is_stale(self, event: events.Event) -> bool:
        """Return whether an event belongs to a recipe or settings that are not the current ones."""
        if isinstance(event, events.Measured | events.OutputMeasured) and event.settings != self.settings:
            return True
        recipe = getattr(event, "recipe", None)
        return recipe is not None and recipe != self.recipe and not isinstance(event, OF_ANY_RECIPE)

    def take(self, event: events.Event) -> None:
        """Store the results that an event of the engine reports. Results that only a window shows are not stored."""
        results = self.results
        match event:
            case events.InputsReady():
                self.set_inputs(event.summary)
            case events.ScanUpdated():
                self.scan.set_report(self.tree, event.report, event.finished)
            case events.Memory():
                self.memory = event.stats
            case events.EngineEnded():
                self.memory = None  # the figures are those of a process that has ended
            case events.RecipeMeasured():
                recipe = Recipe.of(map(Rule.parse, event.report.rules))
                self._keep(make_plan(self.tree, recipe), event.settings, event.report)
            case events.Idle() if self.scan.running:
                self.scan.stopped()
            case events.CastDone():
                self.results = replace(results, losses=Losses(event.lost, with_keys(event.reason)))
            case events.ModulesMeasured():
                newer = {module.name: module for module in event.modules}
                modules = {**results.modules, **newer}
                size = 100 * len(modules) + sum(map(len, modules))
                self.results = replace(results, modules=newer if size > _MOST_MODULES_SIZE else modules)
            case events.OutputMeasured():
                partial = event.drift
                if results.report is None:
                    self.results = replace(results, partial_drift=partial)
                # The history shows these figures until the rest is measured, which may never happen.
                about = self.recipe, self.settings, self.model.inputs, self.plan.planned_bytes
                lost = lost_counts(results.losses.values)
                entry = MeasuredRecipe(*about, partial.output, partial.extent, None, *lost)
                self.measured = remember(self.measured, entry)
            case events.Measured():
                self._set_report(event.report)
            case events.JobGrown():
                if (found := events.partial_of(event, CAUSES)) is not None:
                    self.results = replace(results, partial_causes=found)
            case events.JobDone():
                self._take_answer(event)
            case events.Failed():
                words = with_keys(event.message[:_MOST_OF_A_FAILURE])
                self.results = replace(results, failure=words, failed_module=event.module)

    def _take_answer(self, event: events.JobDone) -> None:
        """Store the result of a job, unless only the job's own window shows it."""
        results, key = self.results, (self.recipe, self.settings)
        if (field := _FIELDS.get(event.ask.job)) is not None:
            self.results = replace(results, **{field: event.result})
            if field in ("causes", "speed", "kernels") and key in self._known:  # an undo shows them again
                self._known[key] = replace(self._known[key], **{field: event.result})
        elif (weights := events.result_of(event, WEIGHTS)) is not None:
            self.results = replace(results, weights={weight.name: weight for weight in weights})
        elif (floor := events.result_of(event, FLOOR)) is not None:
            self.floor = floor
        elif (peaks := events.result_of(event, ACTIVATIONS)) is not None:
            self.served.peaks = peaks

    def _set_report(self, report: DriftReport) -> None:
        modules = {module.name: module for module in report.modules}
        self.results = replace(self.results, report=report, partial_drift=None, modules=modules)
        self._keep(self.plan, self.settings, report)
        key = self.recipe, self.settings
        self._known.pop(key, None)
        if report.sequences.whole:
            now = self.results
            self._known[key] = Results(
                report=report, modules=now.modules, causes=now.causes, speed=now.speed, kernels=now.kernels
            )
        for old in list(self._known)[:-_MOST_KNOWN]:
            del self._known[old]

    def _keep(self, plan: Plan, settings: RunSettings, report: DriftReport) -> None:
        """Add a measurement to the history, even if its recipe or inputs are not the current ones."""
        if plan.recipe == self.recipe or (settings, report.inputs) == (self.settings, self.model.inputs):
            self.scan.note_measured(self.tree, plan, report)
        entry = measured(report, plan.recipe, settings, plan.planned_bytes)
        self.measured = remember(self.measured, entry)
        self.module_log.keep(entry, report.modules)

    # -- comparing -----------------------------------------------------------------------------------------------

    def compare_with(self, entry: MeasuredRecipe) -> None:
        """Make a measured recipe the baseline or, if it already is the baseline, use no baseline."""
        self.baseline = None if self.is_baseline(entry) else entry

    def is_baseline(self, entry: MeasuredRecipe) -> bool:
        return self.baseline is not None and self.baseline.key == entry.key

    @property
    def baseline_mark(self) -> str:
        """The mark of the baseline in the history, such as `#4`, or ""."""
        places = (index for index, entry in enumerate(self.measured) if self.is_baseline(entry))
        return next((f"#{mark(index)}" for index in places), "")

    @property
    def baseline_modules(self) -> Mapping[str, ModuleDrift]:
        """The drift of the modules under the baseline, by name. Empty if it is not stored."""
        return (self.module_log.of(self.baseline) or {}) if self.baseline is not None else {}

    @property
    def loaders(self) -> list[str]:
        """The programs that can load an export: this one alone, unless transformers loads the model."""
        from dtype_engine.recipe.loading import OWN, TRANSFORMERS  # the first paint needs neither
        from dtype_engine.search.families import FAMILIES

        return list(FAMILIES) if self.model.loader == TRANSFORMERS else [OWN]

    @property
    def has_scan(self) -> bool:
        """Whether a scan on the current inputs and settings has estimates, which later sequences make more precise."""
        return self.scan.report is not None and not self.why_scan_is_stale

    @property
    def why_scan_is_stale(self) -> str:
        """Why the scan does not apply to the current inputs and settings, or "" if it does."""
        return self.scan.why_stale(self.model.inputs, self.settings)

    def measured_as(self, recipe: Recipe) -> MeasuredRecipe | None:
        """Return the latest measurement of a recipe with the current inputs and settings, or None."""
        key = recipe, self.settings, self.model.inputs
        return next(
            (each for each in reversed(self.measured) if (each.recipe, each.settings, each.inputs) == key), None
        )

    def prediction(self, plan: Plan) -> Prediction | None:
        """Return the drift that the scan predicts for a plan, or None if it is unknown."""
        return None if self.why_scan_is_stale else self.scan.prediction(self.tree, plan)

    def predicted(self) -> str:
        """Return the drift that the scan predicts, such as `1.2e-03 nats per token`, or "" if it is unknown."""
        return "" if self.why_scan_is_stale else self.scan.predicted(self.tree, self.plan)
