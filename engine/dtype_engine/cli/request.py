"""The request of a command line about one model, as plain data. `ModelCommand` builds it once, and nothing changes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from dtype_engine.cli.program import print_stderr, say, say_share
from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.core.execution import parse_execution
from dtype_engine.core.gc_pause import gc_paused
from dtype_engine.core.input_args import check_files
from dtype_engine.core.input_limits import InputLimits
from dtype_engine.core.opening_progress import OpeningProgress
from dtype_engine.core.options import FLOAT32, LM_EVAL, QUERIES, Options, RunSettings, evaluation
from dtype_engine.core.pipeline_settings import SETTINGS, PipelineSettings
from dtype_engine.core.text import printable
from dtype_engine.core.tree import Tree
from dtype_engine.recipe import Plan, Recipe, Rule, make_plan, require_matches

if TYPE_CHECKING:
    from dtype_engine.checkpoint import Checkpoint
    from dtype_engine.checkpoint.source import Source
    from dtype_engine.runtime.session.session import Session

_AUTOCAST: dict[str, Literal["bfloat16", "float16"]] = {"bfloat16": "bfloat16", "float16": "float16"}
_SETTINGS = tuple(setting.name for setting in dataclasses.fields(RunSettings))


class Planned(msgspec.Struct, frozen=True):
    """A model of which only headers were read, and the dtypes that a recipe plans for its tensors."""

    checkpoint: Checkpoint | None
    """The headers of the model's files, or None if the model is built by Python code."""
    tree: Tree
    plan: Plan


class RunRequest(msgspec.Struct, frozen=True):
    """The model that the command-line argument MODEL names, the rules for it, and the options for opening and running it."""

    model: str | None
    """MODEL as the user typed it, or None. With --against OTHER, this is OTHER, and MODEL is the reference."""
    options: Options
    """The options, with the settings of the recipe file except for those that the command line sets."""
    recipe: Recipe = msgspec.field(default_factory=Recipe)
    """The rules of the recipe file, followed by the rules of --cast."""
    preset: str | None = None
    """The name of the preset, or None. Its rules depend on the model's tree, so `with_preset` adds them later."""
    recipe_file: Path | None = None
    made_for: str | None = None
    """The model for which the recipe was made, as the recipe file says."""
    explicit: frozenset[str] = frozenset()
    """The names of the parameters that the user gave on the command line."""

    @classmethod
    def of(
        cls, values: Mapping[str, Any], explicit: frozenset[str], runs: bool, checks_inputs: bool = True
    ) -> RunRequest:
        """Build the request from the values of a command line, keyed by parameter name. Raises UserError.

        runs: whether the values include the options of a forward pass. checks_inputs: whether the input files are on this machine.
        """
        preset, file = values.get("preset"), values.get("recipe_file")
        if preset is not None:
            from dtype_engine.recipe.presets import preset as preset_named

            preset_named(preset)
        recipe, made_for, settings = Recipe(), None, None
        if file is not None:
            from dtype_engine.recipe.file import read_recipe_file

            written = read_recipe_file(file)
            recipe, made_for, settings = written.recipe, written.model, written.settings
        recipe = Recipe((*recipe.rules, *map(Rule.parse, values.get("casts", ()))))
        options = _options(values, runs)
        if checks_inputs:
            check_files(options)
        if settings is not None and runs:
            given = {name: getattr(options.settings, name) for name in _SETTINGS if name in explicit}
            options = dataclasses.replace(options, settings=dataclasses.replace(settings, **given))
        model, against = values.get("model"), values.get("against")
        if (revision := values.get("revision")) is not None:
            from dtype_engine.checkpoint.hub import HubAddress

            model = str(HubAddress.parse(model or "").of_revision(revision))
        if (component := values.get("component")) is not None:
            from dtype_engine.checkpoint.source import component_of

            model, against = (text and component_of(text, component, options.download) for text in (model, against))
        if against is not None:
            if "reference" in explicit and options.reference != FLOAT32:
                raise UserError("--reference stored is MODEL itself: leave it out, or leave out --against")
            model, options = against, dataclasses.replace(options, reference=model or "demo")
            explicit |= {"reference"}
        return cls(model, options, recipe, preset, file, made_for, explicit)

    def locate(self, python_only_by: str | None = None) -> Source:
        """Find the model. Raises UserError, also for an option that does not apply to this kind of model.

        python_only_by: None to allow Python code; otherwise the option that the error recommends for code, such as `--model`.
        """
        from dtype_engine.checkpoint.source import locate, locate_metric

        options = self.options
        source = locate(
            self.model, options.trust_pickle, options.download, python_only_by, say_share, options.base, options.config
        )
        say("")
        source.refuse_other_options(options)
        for metric in options.metrics:
            if evaluation(metric) is None:
                locate_metric(metric)
        return source

    @gc_paused(freeze=True)  # garbage collections over everything that is imported take 0.4 s of 2.7 s
    def open_session(self, source: Source | None = None) -> Session:
        """Open the model and cast it by the rules. source: what `locate` returned, or None to locate the model first. Raises
        UserError, also for a rule that matches nothing.
        """
        source = source or self.locate()
        from dtype_engine.service.opening import refuse_unmatched

        refuse_unmatched(source, self.options, self.recipe)
        from dtype_engine.runtime.session.opening import open_session

        with OpeningProgress(partial(say_share, job="opening"), source.kind) as on_step:
            session = open_session(source, self.options, on_step=on_step)
        title = session.model.title
        if self.made_for is not None and self.made_for != title:
            made_for = printable(self.made_for)
            print_stderr(f"dtype-engine: note: {self.recipe_file} was made for {made_for}, and this is {title}")
        recipe = self.with_preset(session.tree)
        require_matches(session.tree, recipe)
        session.apply(recipe, on_progress=lambda done, total: say_share("casting", done, total))
        return session

    def plan(self, source: Source) -> Planned:
        """Return the headers of the model and the dtypes that the rules give its tensors. No weights are loaded.

        Without rules the headers are enough. Rules need the architecture (its classes, ties and names), whose import takes seconds.
        Raises UserError, also for a rule that matches nothing or needs unknown module classes.
        """
        checkpoint = source.open()
        if checkpoint is not None and not self.recipe.rules and not self.preset and not self.options.architecture:
            return Planned(checkpoint, tree := checkpoint.tree(), make_plan(tree, self.recipe))
        from dtype_engine.runtime.building.describe import describe

        tree = describe(source, self.options).tree
        return Planned(checkpoint, tree, require_matches(tree, self.with_preset(tree)))

    def with_preset(self, tree: Tree) -> Recipe:
        """Return the rules that the chosen preset gives for this tree, followed by the rules of `recipe`. Raises UserError."""
        if self.preset is None:
            return self.recipe
        from dtype_engine.recipe.presets import preset

        return Recipe((*preset(self.preset).recipe(tree).rules, *self.recipe.rules))


def _options(values: Mapping[str, Any], runs: bool) -> Options:
    """Return the `Options` for the values of a command's parameters. runs: whether the values include the options of a forward
    pass. Raises UserError for a dtype that is unknown or not allowed.
    """
    given = {option.name: values[option.name] for option in dataclasses.fields(Options) if option.name in values}
    given["pipeline"] = PipelineSettings(**{name: values[name] for name in SETTINGS if name in values})
    given |= {"limits": InputLimits(**dict(values["limits"]))} if "limits" in values else {}
    if not runs:
        return Options(**({"device": "cpu"} | given))
    if unknown := [text for text in values.get("evals", ()) if evaluation(text) is None]:
        raise UserError(f"--eval {unknown[0]}: write {LM_EVAL}TASK, such as {LM_EVAL}arc_easy, or {QUERIES}FILE.jsonl")
    given["metrics"] = (*values.get("metrics", ()), *values.get("evals", ()))
    compute = dtypes.parse_target(values["compute"])
    if compute not in dtypes.COMPUTE_DTYPES:
        raise UserError(f"--compute {values['compute']}: choose one of {', '.join(dtypes.COMPUTE_DTYPES)}")
    autocast = values["autocast"]
    cast = _AUTOCAST.get(dtypes.parse_target(autocast)) if autocast is not None else None
    if autocast is not None and cast is None:
        raise UserError(f"--autocast {autocast}: torch.autocast knows bfloat16 and float16")
    others = {name: values[name] for name in ("float_inputs", "quantize_activations", "classes_dim")}
    others |= {name: parse_execution(values[name]) for name in ("execution", "reference_execution")}
    others["acceptance"] = values.get("acceptance", False)
    return Options(**given, settings=RunSettings(compute, cast, **others))
