"""The controller of the experiment and the engine. It does not depend on widgets."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from msgspec.structs import replace

from dtype_engine.core import dtypes
from dtype_engine.core.callbacks import ignore
from dtype_engine.core.errors import UserError
from dtype_engine.core.units import human_bytes
from dtype_engine.recipe import History, Recipe, Rule, explain_no_match, make_plan
from dtype_engine.service import commands, events
from dtype_engine.service.engine import Engine
from dtype_engine.service.jobs import ACTIVATIONS, PassSizes
from dtype_tui.rendering.hint_keys import with_keys
from dtype_tui.state.activity import Progress
from dtype_tui.state.engine_life import EngineLife, Severity
from dtype_tui.state.folds import patterns_for
from dtype_tui.state.node_rules import not_kept_in_float32, reference_rule, rules_within
from dtype_tui.state.rule_list import RuleList

if TYPE_CHECKING:
    from dtype_engine.core.options import RunSettings
    from dtype_engine.service.save_requests import SaveRequest
    from dtype_tui.state.experiment import Experiment
    from dtype_tui.state.launch import Launch
    from dtype_tui.state.measurement_log import MeasuredRecipe


class Controller:
    """Controls one experiment and the engine that runs it. Every method except `handle` calls `changed` after it has changed the
    state.

    notify: shows a sentence until the user has read it. changed: redraws the screen. read_only: whether reading and writing files
    is forbidden. withdraw: hides a sentence that `notify` shows.
    """

    def __init__(
        self,
        experiment: Experiment,
        engine: Engine,
        notify: Callable[[str, Severity], None],
        changed: Callable[[], None],
        read_only: bool = False,
        withdraw: Callable[[str], None] = ignore,
    ) -> None:
        self.experiment = experiment
        self.read_only = read_only
        experiment.model = replace(experiment.model, host=engine.host)
        self.engine = engine
        self.notify = notify
        self._changed = changed
        self.withdraw = withdraw
        self.life = EngineLife(engine, experiment.scan, notify, changed, withdraw)
        self.activity = self.life.activity
        self.open_error: str | None = None
        """Why the model could not be opened, or None if it is open or still opening."""
        self._saved_recipe = Recipe()
        """The recipe from the command line, or the one that was last saved to a file or with a checkpoint."""
        self._preset: str | None = None
        """Name of the preset to apply once the module classes are known."""
        self._after_preset = Recipe()
        """The rules from the command line, which follow those of `_preset`."""
        self._notified: set[str] = set()
        self._told = Recipe()
        """The recipe that the engine knows."""
        self._pending: set[tuple[commands.Command, Recipe, RunSettings]] = set()
        """The requests of `ask_once` that the engine has yet to answer, each with its recipe and settings."""

    @property
    def unsaved_rules(self) -> int:
        """The number of rules to save: 0 if the recipe is saved or from the command line, or if the session is read-only."""
        return 0 if self.read_only or self.experiment.recipe == self._saved_recipe else len(self.experiment.recipe)

    # -- events of the engine ------------------------------------------------------------------------------------

    def handle(self, event: events.Event) -> bool:
        """Update the state from an event of the engine. The caller has to redraw the screen. Returns False, and changes nothing,
        for an event of another recipe or other settings than the current ones.
        """
        self._note_answered(event)
        if self.experiment.is_stale(event):
            return False
        match event:
            case events.HeadersRead() | events.ModelReady() | events.OpenFailed():
                self._handle_opening(event)
            case _ if isinstance(event, Progress):
                self.life.follow(event)
                self.experiment.take(event)
            case events.EngineEnded() | events.EngineLost() | events.EngineBack():
                self.life.follow_connection(event)
                self.experiment.take(event)
            case events.Noticed():
                self.notify(event.message, "warning")
            case events.InputsRefused() | events.Refused():
                self.notify(event.message, "error")
            case events.Saved():
                self.activity.saving = False
                self.life.forget_warning()
                if not event.done:
                    self._saved_recipe = Recipe()
                self._notify_all((event.sentence, *event.notices), "information" if event.done else "warning")
            case events.Failed():
                self.experiment.take(event)
                self.notify("the run failed: the Drift pane says why", "error")
            case events.Stopped():
                self.life.note_stopped(event)
            case _:
                self.experiment.take(event)
                if isinstance(event, events.CastDone) and event.lost:
                    from dtype_engine.reports.text_losses import loss_notice  # imported late, for a faster first paint

                    if words := loss_notice(event.lost):
                        self.notify(words, "warning")
                if isinstance(event, events.Measured):
                    self._notify_all([each for each in event.report.notices if each not in self._notified], "warning")
        return True

    def _handle_opening(self, event: events.HeadersRead | events.ModelReady | events.OpenFailed) -> None:
        experiment = self.experiment
        match event:
            case events.HeadersRead():
                experiment.replace_tree(event.tree)
                experiment.model = replace(experiment.model, provenance=event.provenance)
                self._notify_all(event.notices, "information")
                self._warn_unmatched()
                if self.open_error is not None:
                    self._start_with_preset()
            case events.ModelReady():
                self.open_error = None  # it was open without its weights, which have been downloaded
                experiment.set_model(event)
                self._start_with_preset()
                self._notify_all(event.notices, "warning")
                self._warn_unmatched()
            case events.OpenFailed():
                self.open_error = with_keys(event.message)
                experiment.model = replace(
                    experiment.model, no_forward=self.open_error, partial=False, memory_bytes=event.memory_bytes
                )
                if not event.classes_follow:
                    self._start_with_preset()

    def _note_answered(self, event: events.Event) -> None:
        """Remove the requests that an event answers from `_pending`, or all requests if no more answers will come."""
        match event:
            case events.JobDone():
                self._pending = {key for key in self._pending if key[0] != event.ask}
            case events.ModelReady():
                self._pending = {
                    key for key in self._pending if not isinstance(key[0], commands.Download | commands.OpenOverMemory)
                }
            case events.Idle() | events.EngineEnded() | events.Failed() | events.Refused() | events.Stopped():
                self._pending.clear()

    def _notify_all(self, sentences: Sequence[str], severity: Severity) -> None:
        self._notified.update(sentences)  # so that the next measurement does not repeat them
        for sentence in sentences:
            self.notify(sentence, severity)

    # -- the start -----------------------------------------------------------------------------------------------

    def begin(self, launch: Launch) -> None:
        """Restore the saved session, if any. Then apply the recipe from the command line and, once the module classes are known,
        the preset.
        """
        recipe, saved = launch.recipe, launch.saved
        self._saved_recipe = recipe
        if saved is not None:
            self.experiment.restore(History.of(saved.rule_lists, saved.at))
            self.experiment.measured = saved.valid_measurements
            self.experiment.scan.requested = saved.scanned  # so that the key for the scan resumes it
            served = self.experiment.served
            served.context = launch.context or saved.context
            served.batch = launch.batch if launch.batch > 1 else saved.batch
            served.budget = launch.budget or saved.budget
            self._tell_recipe()
            recipe = Recipe.of((*saved.recipe.rules, *recipe.rules))
        if self.experiment.push(recipe):
            self._tell_recipe()
        self._preset, self._after_preset = launch.preset, recipe
        if self._preset is None:
            return
        from dtype_engine.recipe.presets import preset  # imported late, for a faster first paint

        tree_suffices = not preset(self._preset).needs_classes and self.experiment.model.has_tree
        if self.experiment.tree.has_classes or tree_suffices:
            self._start_with_preset()

    def _start_with_preset(self) -> None:
        if self._preset is None:
            return
        from dtype_engine.recipe.presets import preset

        name, self._preset = self._preset, None
        try:
            made = preset(name).recipe(self.experiment.tree)
        except UserError as error:
            self.notify(error.sentence, "warning")
            return
        from_command_line = self._saved_recipe == self._after_preset
        if self.experiment.push(Recipe((*made.rules, *self._after_preset.rules))):
            if from_command_line:
                self._saved_recipe = self.experiment.recipe
            self._tell_recipe()

    # -- recipes -------------------------------------------------------------------------------------------------

    def apply_recipe(self, recipe: Recipe) -> bool:
        """Make a recipe the current one. Returns False if it already is."""
        return self._follow(self.experiment.push(recipe))

    def apply_rules(self, rules: RuleList) -> bool:
        """Make a list of rules the current one. Returns False if it already is."""
        return self._follow(self.experiment.push_rules(rules))

    def _follow(self, changed: bool) -> bool:
        """Send the current recipe to the engine if the engine has another one. changed: whether to redraw; it is also returned."""
        if self.experiment.recipe != self._told:
            if self.experiment.same_plan and not self.activity.busy:
                self._tell_recipe(commands.FollowRecipe)
            else:
                self._tell_recipe()
                if self.open_error is None:
                    self.life.begin("casting")
            self.life.forget_warning()
        if changed:
            self._changed()
        return changed

    def _tell_recipe(self, command: type[commands.SetRecipe | commands.FollowRecipe] = commands.SetRecipe) -> None:
        self._told = self.experiment.recipe
        self.engine.request(command(self._told))

    def add_rule(self, rule: Rule) -> None:
        """Add a rule, or tell the user why it is refused. Warn if the rule casts a module that the model declares to need
        float32.
        """
        experiment = self.experiment
        if (refusal := experiment.refusal(rule)) is not None:
            self.notify(refusal, "warning")
            return
        if not self.apply_rules(experiment.rules.then(rule)):
            self.notify(f"{rule} is already applied", "information")
            return
        self._warn_unmatched()
        broken = list(not_kept_in_float32(experiment.tree, experiment.plan, len(experiment.recipe) - 1))
        if broken:
            more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
            self.notify(f"{broken[0]}{more} should stay in float32, as the model's own code declares", "warning")

    def cast_node(self, node: str, dtype: str) -> None:
        """Cast all tensors at or below a module, a tensor or a fold. If this changes no dtype, only notify the user."""
        experiment = self.experiment
        if not experiment.model.has_tree:
            self.notify("nothing can be cast before the model's tensors are known", "information")
            return
        if dtype == "int8" and node in experiment.served.caches:
            dtype = "int8@token"  # the only format of a KV cache with elements of int8
        rule = Rule.make(patterns_for(experiment.tree, node)[0], dtype)
        is_known = not experiment.model.partial and not experiment.plan.pending_classes
        if is_known and experiment.refusal(rule) is None:
            after = make_plan(experiment.tree, experiment.rules.then(rule).recipe)
            if after.same_casts(experiment.plan):
                has = "as stored" if dtype == dtypes.STORED else dtype
                self.notify(f"{node or 'the model'} is {has} already", "information")
                return
        self.add_rule(rule)

    def _warn_unmatched(self) -> None:
        experiment, plan = self.experiment, self.experiment.plan
        for index in plan.too_slow:
            pattern = experiment.recipe.rules[index].pattern
            self.notify(f"rule {index + 1}: {pattern} takes too long to match: simplify it", "warning")
        for index in plan.unmatched:
            rule = experiment.recipe.rules[index]
            reason = explain_no_match(experiment.tree, rule.pattern, plan.selections[index], rule.dtype)
            self.notify(f"rule {index + 1}: {reason}", "warning")

    def undo(self) -> None:
        if not self._follow(self.experiment.undo()):
            self.notify("nothing left to undo", "information")

    def redo(self) -> None:
        if not self._follow(self.experiment.redo()):
            self.notify("nothing to redo", "information")

    def drop_rules(self, node: str) -> None:
        """Remove the rules that match only tensors at or below this node. If there is no such rule, tell the user why."""
        inside, beyond = rules_within(self.experiment.tree, self.experiment.plan, node)
        if inside:
            self.apply_rules(self.experiment.rules.without(inside))
        elif beyond:
            go = "go to a node above, or cast this one (8: as stored)"
            self.notify(f"rule {beyond[-1] + 1} also matches tensors beyond this node; {go}", "warning")
        else:
            self.notify("no rule matches this node", "information")

    def change_rule(self, row: int, rule: Rule) -> None:
        """Replace the rule at index `row` of the list of rules, unless the new rule is refused."""
        if (refusal := self.experiment.refusal(rule)) is not None:
            self.notify(refusal, "warning")
        elif self.apply_rules(self.experiment.rules.with_rule(row, rule)):
            self._warn_unmatched()
        else:
            self.notify(f"rule {row + 1} is {rule} already", "information")

    def put_back(self, node: str) -> None:
        """Add a rule that gives a node the dtype of the reference, and tell the user how many bytes this costs."""
        experiment, name = self.experiment, node or "the model"
        rule, before = reference_rule(experiment.tree, node, experiment.model.reference), experiment.plan
        rules = experiment.rules.then(rule)
        if make_plan(experiment.tree, rules.recipe).same_casts(before):
            self.notify(f"{name} already has the reference's dtype", "information")
            return
        self.apply_rules(rules)
        after = experiment.plan.planned_bytes
        change = after - before.planned_bytes
        more = f"{human_bytes(abs(change))} {'more' if change > 0 else 'less'}"
        cost = f": {more}, {human_bytes(after)} in all" if change else ""
        dtype = "as stored" if rule.dtype == dtypes.STORED else f"in {rule.dtype}"
        self.notify(f"{name} is {dtype} again{cost}; u undoes this", "information")

    def apply_remedy(self) -> None:
        """Apply the rules that make the output finite or, if there are none, those that keep the values which casts lose."""
        nonfinite, losses = self.experiment.results.nonfinite, self.experiment.results.loss_remedy
        rules = nonfinite.remedy if nonfinite is not None else ()
        if not rules and losses is not None:
            rules = losses.rules
        if rules:
            self.apply_rules(functools.reduce(RuleList.then, map(Rule.parse, rules), self.experiment.rules))
            return
        words = "nothing needs a remedy"
        if nonfinite is not None:
            words = nonfinite.reason
        elif self.experiment.results.failure is not None:
            words = "no rules are known that make the run work: the Drift pane says why it failed"
        self.notify(words, "information")

    def replace_rules(self, recipe: Recipe) -> None:
        if not self.apply_recipe(recipe):
            self.notify("this preset is already applied", "information")

    def set_context(self, context: int, batch: int) -> None:
        self.experiment.served.context, self.experiment.served.batch = context, batch
        self._changed()

    def set_budget(self, budget: int | None) -> None:
        """Show the largest context at which weights, KV cache and activations fit in `budget` bytes. None: show none."""
        self.experiment.served.budget = budget
        self._changed()

    def estimate_activations(self) -> None:
        """Request the memory of activations at the current context and at two longer ones. Values in between are interpolated."""
        context = self.experiment.tokens
        contexts = sorted({context, 2 * context, max(4 * context, self.experiment.tree.kv_cache.longest or 0)})
        self.engine.request(ACTIVATIONS.ask(PassSizes(tuple(contexts), self.experiment.served.batch)))

    def use_preset(self, name: str) -> None:
        """Replace all rules by those of a preset. Raises UserError if the name or the model's tensors are unknown."""
        from dtype_engine.recipe.presets import preset

        chosen = preset(name)
        if not self.experiment.model.has_tree:
            raise UserError("a preset needs the model's tensors, and they are not known yet")
        self.replace_rules(chosen.recipe(self.experiment.tree))

    def go_back_to(self, measured: MeasuredRecipe) -> None:
        """Make a measured recipe the current one. The current settings stay, even if it was measured with others."""
        if measured.settings != self.experiment.settings:
            self.notify(f"that was measured with {measured.settings}; the current settings stay", "information")
        if not self.apply_recipe(measured.recipe):
            self.notify("this recipe is already applied", "information")

    # -- requests to the engine ----------------------------------------------------------------------------------

    def _expect(self, job: str) -> None:
        self.life.expect(job)
        self._changed()

    def measure(self) -> None:
        """Measure the current recipe over all inputs. A running measurement of this recipe is extended to all inputs."""
        if not self.life.is_available():
            return
        if self.activity.running != "measure":
            self.experiment.forget_figures()
        self.engine.request(commands.Measure(read_values=True, in_full=True))
        self._changed()

    def set_settings(self, settings: RunSettings) -> None:
        """Run the cast model with these settings from now on, and measure it."""
        if settings == self.experiment.settings:
            return
        self.experiment.set_settings(settings)
        self.engine.request(commands.SetSettings(settings))
        self._changed()

    def set_inputs(self, line: str) -> None:
        """Run the model, from now on, on the inputs that `line` names: a prompt or the paths of files."""
        self._pending.clear()
        self.engine.request(commands.SetInputs(line))
        self._expect("inputs")

    def ask(self, command: commands.Command) -> None:
        """Request a job. If it has to run the model and the model can't run, only tell the user why."""
        if command.traits.needs_model and self.experiment.model.no_forward:
            self.notify(self.experiment.model.no_forward, "warning")
            return
        self.engine.request(command)
        self._expect(command.name)

    def ask_once(self, command: commands.Command) -> None:
        """Request a job, unless the engine has yet to answer the same request for the same recipe and settings."""
        request = command, self.experiment.recipe, self.experiment.settings
        if request not in self._pending:
            self.ask(command)
            if self.activity.busy:  # otherwise there is no engine, or the request was refused
                self._pending.add(request)

    def save(self, request: SaveRequest) -> None:
        from dtype_engine.checkpoint.export_folder import is_one_file
        from dtype_engine.service.save_requests import ExportRequest, RecipeRequest

        writes_folder = isinstance(request, ExportRequest) and not is_one_file(request.folder)
        if writes_folder or isinstance(request, RecipeRequest):  # which keep the recipe
            self._saved_recipe = self.experiment.recipe
        self.engine.save(request)
        self._expect("write")

    def stop(self) -> None:
        """Ask the engine to stop its jobs. If a job has not stopped after an earlier call, restart the engine."""
        self._pending.clear()
        if self.life.must_end:
            self.restart_engine()
        else:
            self.life.stop()

    def stop_job(self, job: str) -> None:
        self._pending.clear()
        self.life.stop(job)
        if job == "scan" and self.activity.running != "scan":
            self.experiment.scan.stopped()  # the engine sends no event for a scan that had not begun

    def restart_engine(self) -> None:
        """End the engine, whatever it is doing, and start another one with the same recipe."""
        self._pending.clear()
        if self.life.restart():
            self.open_error = self.experiment.memory = None
            self._changed()

    def measure_recipes(self, recipes: Sequence[Recipe]) -> None:
        """Measure several recipes without making them current. Each is then added to the history."""
        if recipes:
            self.ask(commands.MeasureRecipes(tuple(dict.fromkeys(recipes))))

    # -- the scan ------------------------------------------------------------------------------------------------

    def next_of_scan(self) -> Literal["choose", "show", "wait"]:
        """Resume a stopped scan, if there is one. Returns what to open: "choose" for the choice of dtypes of a new scan, "show"
        for the results, or "wait" for nothing.
        """
        experiment, scan = self.experiment, self.experiment.scan
        if experiment.model.no_forward:
            self.notify(experiment.model.no_forward, "warning")
            return "wait"
        if why := experiment.why_scan_is_stale:
            self.notify(f"{why}: scan again", "information")
            scan.clear()
            return "choose"
        if self.resume_scan() or scan.report is not None:
            return "show" if scan.report is not None else "wait"
        if scan.running:
            self.notify("scanning: the first estimates follow the first sequence", "information")
            return "wait"
        return "choose"

    def resume_scan(self) -> bool:
        """Resume a stopped scan. Returns False if no scan was stopped."""
        scan = self.experiment.scan
        if not scan.requested or scan.running or scan.finished:
            return False
        self.start_scan(scan.requested)
        return True

    def start_scan(self, dtypes: tuple[str, ...]) -> None:
        """Start a scan in these dtypes, or resume the last scan if it had the same dtypes."""
        if not self.life.is_available():
            return
        scan = self.experiment.scan
        if scan.paused:
            self.pause_scan()
        if dtypes != scan.requested:
            scan.clear()
        scan.begin(dtypes)
        self.ask(commands.Scan(dtypes, keep=not self.read_only))

    def pause_scan(self) -> None:
        scan = self.experiment.scan
        if scan.running or scan.paused:
            scan.paused = not scan.paused
            scan.version += 1
            self.engine.request(commands.Pause(scan.paused))
            self._changed()
