"""One open model and all operations on it, as a synchronous public API, which the app's service uses, too."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, Literal, ParamSpec, TypeVar

from dtype_engine.checkpoint import unchanged
from dtype_engine.core.callbacks import ignore
from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import NoForward, UserError
from dtype_engine.core.execution import Execution
from dtype_engine.core.file_layouts import COMPRESSED_TENSORS
from dtype_engine.core.hints import ON_THE_COMMAND_LINE, fill_hints
from dtype_engine.core.input_args import other_inputs
from dtype_engine.core.options import InputOptions, Options, RunSettings
from dtype_engine.core.text import printable
from dtype_engine.core.tree import Tree
from dtype_engine.core.units import human_bytes
from dtype_engine.recipe import Plan, Recipe, Rule, make_plan
from dtype_engine.recipe.minimize import minimize
from dtype_engine.reports.notebook import drift_html, drift_repr, scan_html, session_html, tree_html
from dtype_engine.results.attribution import (
    AttributionReport,
    LossRemedy,
    NoiseFloor,
    NonFiniteDiagnosis,
    near_kernels,
)
from dtype_engine.results.drift import DriftReport, ImplicitCastStats, ModuleDrift, OutputDrift
from dtype_engine.results.execution import ExecutionReport
from dtype_engine.results.expert_tokens import ExpertTokens
from dtype_engine.results.export import ExportReport, VerifyReport
from dtype_engine.results.given_logits import GivenLogits
from dtype_engine.results.inputs import InputsSummary
from dtype_engine.results.losses import ValueLoss
from dtype_engine.results.memory import MemoryStats
from dtype_engine.results.merge_error import MergeError
from dtype_engine.results.rounding import FittedTo, HeldOut, WeightGain
from dtype_engine.results.runs import Generation, SpeedReport
from dtype_engine.results.scan import Prediction, ScanReport
from dtype_engine.results.serving_memory import ActivationMemory
from dtype_engine.results.token_choices import TokenReport
from dtype_engine.runtime.inputs import Inputs, summarize
from dtype_engine.runtime.inputs.text import with_next_tokens, without_cache
from dtype_engine.runtime.inputs.validate import with_labels
from dtype_engine.runtime.measure.attribution import Attribution, OnCauses, Part, PartDrift
from dtype_engine.runtime.measure.attribution import OnProgress as OnParts
from dtype_engine.runtime.measure.execution_check import compare_executions, usual_executions
from dtype_engine.runtime.measure.expert_tokens import expert_tokens
from dtype_engine.runtime.measure.generation import OnText, OnTokens, generate, refuse_tokens
from dtype_engine.runtime.measure.implicit_casts import implicit_casts
from dtype_engine.runtime.measure.listener import MeasurementListener, OnProgress
from dtype_engine.runtime.measure.loss_remedy import tried_remedy, untried_remedy
from dtype_engine.runtime.measure.noise_floor import measure_noise_floor
from dtype_engine.runtime.measure.nonfinite import diagnose_nonfinite
from dtype_engine.runtime.measure.own_answers import ANSWER_TOKENS, own_answers
from dtype_engine.runtime.measure.speed import REPEATS, OnPasses, measure_speed
from dtype_engine.runtime.measure.token_choices import (
    TOKENS,
    passes_over,
    text_floors,
    text_prompts,
    token_report,
    written_texts,
)
from dtype_engine.runtime.measure.token_choices import OnStep as OnTexts
from dtype_engine.runtime.measure.weight_errors import reference_differences
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.passes.model_behavior import ModelBehavior, Run
from dtype_engine.runtime.passes.runner import ForwardRunner
from dtype_engine.runtime.scan.last_scan import LastScan, ScanTask
from dtype_engine.runtime.scan.savable_scan import OnEstimate, OnStep
from dtype_engine.runtime.session.activations import estimated_activations, measured_activations
from dtype_engine.runtime.session.calibration import Calibration
from dtype_engine.runtime.session.casting import Casting
from dtype_engine.runtime.session.casting import OnProgress as OnCast
from dtype_engine.runtime.session.component_inputs import inputs_of, tried_inputs
from dtype_engine.runtime.session.drift import DriftMeasurements
from dtype_engine.runtime.session.given_logits import given_logits, save_logits
from dtype_engine.runtime.session.held_out import measure_held_out
from dtype_engine.runtime.session.process_memory import memory_stats
from dtype_engine.runtime.session.rounding_gains import rounding_gains
from dtype_engine.runtime.session.rounding_notices import fitted_to
from dtype_engine.runtime.session.saved_statistics import SavedStatistics
from dtype_engine.runtime.session.search_report import FoundRecipe, search_report, solved
from dtype_engine.runtime.weights.merge_error import merge_error
from dtype_engine.search.constraints import parse_bytes
from dtype_engine.search.families import FAMILIES
from dtype_engine.search.pareto import Constraints, ParetoFront, make_front
from dtype_engine.search.sensitivity import predict

if TYPE_CHECKING:
    import torch

    from dtype_engine.recipe.served import Served
    from dtype_engine.runtime.export import Contents

# Results do not define how they show themselves, because they must not import the code that writes reports.
DriftReport.__repr__ = drift_repr  # type: ignore[assignment]
DriftReport._repr_html_ = drift_html  # type: ignore[attr-defined]
ScanReport._repr_html_ = scan_html  # type: ignore[attr-defined]
Tree._repr_html_ = tree_html  # type: ignore[attr-defined]

P = ParamSpec("P")
T = TypeVar("T")


def reading_weights(method: Callable[Concatenate[Session, P], T]) -> Callable[Concatenate[Session, P], T]:
    """Decorate a method that reads weights: it raises UserError if the weights' files have changed since they were opened."""

    @functools.wraps(method)
    def reads(self: Session, /, *arguments: P.args, **named: P.kwargs) -> T:
        with unchanged(self.model.identities):
            return method(self, *arguments, **named)

    return reads


class Session:
    """An open model, its current recipe, and its measurements. `dtype_engine.open` returns one.

    Many methods take `on_progress`, which is called with the number of finished steps and the number of all steps, and `cancelled`,
    which is called between module calls or tensors: if it returns True, the method raises Cancelled.

    Methods that read weights raise UserError if the model's files have changed since they were opened. Methods that run the model
    raise NoForward if it can't be run, and KernelError if an operation has no kernel for a dtype.

    In the examples, `de` is `dtype_engine`, `session` an open model and `folder` a `pathlib.Path`.

    >>> print(session)
    Session: demo on cpu
      rules   none: as stored
      memory  stored 2.70 MiB → planned 2.70 MiB
      inputs  1 sequence of your prompts, 27 tokens
    """

    def __init__(self, model: LiveModel, options: Options, inputs: Inputs | None = None) -> None:
        self.model = model
        self.options = options
        self.settings = options.settings
        """The settings of candidate runs. They may be replaced between measurements."""
        given = given_logits(model, options)
        if given is not None and inputs is not None:
            raise UserError("the tokens come from the file of outputs: leave the inputs out")
        self.given_logits: GivenLogits | None = None if given is None else given.about
        """The file of outputs that the options name, or None."""
        if inputs is not None:
            inputs = with_next_tokens(model, with_labels(model, inputs) if options.metrics else inputs)
            inputs = without_cache(model, inputs)
        self.inputs = inputs if given is None else given.inputs
        """The inputs on which the model is run, or None if the model can't be run."""
        self.why_no_forward: str | None = None
        """Why the model can't be run, or None if it can. The app replaces placeholders in this text by keys, the command line by
        options.
        """
        self.scanned: ScanReport | None = None
        """The result of the last scan, which `predict` and `search` use."""
        self._casting = Casting(model)
        self._behavior = ModelBehavior()
        self.calibration: Calibration | None = None
        """The inputs to which roundings such as GPTQ are fitted, or None if the model can't be run."""
        self._statistics: SavedStatistics | None = None
        self._drift = DriftMeasurements(model, options, self._behavior, given)
        self._floor: tuple[Inputs, RunSettings, NoiseFloor] | None = None
        self._parts: tuple[Recipe, RunSettings, Inputs, dict[Part, PartDrift]] | None = None
        """The recipe, settings and inputs of the last attribution, and what it has measured, from which the next one continues."""
        self._scan = LastScan(self._calibration_inputs)
        if self.inputs is None:
            try:
                self.inputs = inputs_of(model, options)
            except NoForward as error:
                self.why_no_forward = error.sentence
        if self.inputs is not None:
            self._calibrate()

    def __repr__(self) -> str:
        return (
            f"Session: {printable(self.model.title, 100)} on {self.model.device}\n"
            f"  rules   {printable(str(self.recipe) if self.recipe.rules else 'none: as stored', 300)}\n"
            f"  memory  stored {human_bytes(self.plan.stored_bytes)} → planned {human_bytes(self.plan.planned_bytes)}\n"
            f"  inputs  {printable(self._inputs_text(), 300)}"
        )

    def _repr_html_(self) -> str:
        return session_html(self.model.title, self.tree, self.plan, self._inputs_text())

    def _inputs_text(self) -> str:
        return f"none: {self.no_forward}" if self.inputs is None else self.inputs.description

    @property
    def no_forward(self) -> str | None:
        """The reason why the model can't be run, or None if it can.

        >>> session.no_forward
        """
        return None if self.why_no_forward is None else fill_hints(self.why_no_forward, ON_THE_COMMAND_LINE)

    @property
    def tree(self) -> Tree:
        """The model's modules and tensors, with module classes and tied weights.

        >>> session.tree.stored_bytes
        2831232
        """
        return self.model.tree

    @property
    def recipe(self) -> Recipe:
        """The current recipe.

        >>> session.recipe
        Recipe(rules=())
        """
        return self.plan.recipe

    @property
    def plan(self) -> Plan:
        """The dtype of every tensor under the current recipe.

        >>> set(session.plan.dtypes.values())
        {'float32'}
        """
        return self._casting.plan

    @reading_weights
    def cast(self, pattern: str, dtype: str | torch.dtype) -> Plan:
        """Add a rule to the recipe, and cast the tensors that match it in place. Returns the plan of all rules.

        Args:
            pattern: Names of modules or tensors, with wildcards, or `type:` and a class, or `re:` and a regular expression.
            dtype: The dtype to cast to: a name or short name, a `torch.dtype`, or "stored".

        Raises:
            PatternError: The pattern is invalid, or takes too long to match.
            UserError: The dtype is unknown, the pattern matches nothing, or the device lacks the dtype or memory.

        Example:
            >>> plan = session.cast("*.mlp", "bfloat16")
            >>> plan.planned_bytes < plan.stored_bytes
            True
        """
        self._casting.add(Rule.make(pattern, dtype))
        return self.plan

    @reading_weights
    def apply(
        self, recipe: Recipe | FoundRecipe, on_progress: OnCast | None = None, cancelled: IsCancelled = never
    ) -> None:
        """Replace the recipe, also by one that `search` found, as a step that `undo` can revert. The last rule that matches a
        tensor decides its dtype. Rules that match nothing have no effect; `plan.unmatched` lists them. `on_progress` is called with
        the numbers of cast weights and of weights to cast. Raises TooSlow, before anything is changed, if a pattern takes too long
        to match, and UserError if the device lacks a dtype or memory; the previous recipe then stays. After Cancelled, the next
        call that applies a recipe completes the cast.

        >>> session.apply(de.Recipe.of([de.Rule.parse("*=float16"), de.Rule.parse("*norm*=float32")]))
        >>> len(session.recipe)
        2
        """
        recipe = recipe if isinstance(recipe, Recipe) else recipe.recipe
        self._casting.push(recipe, on_progress, cancelled)

    @reading_weights
    def use_recipe(self, recipe: Recipe, on_progress: OnCast | None = None, cancelled: IsCancelled = never) -> None:
        """Replace the recipe as `apply` does, but without a step that `undo` can revert. This is for callers that keep their own
        history.

        >>> session.use_recipe(de.Recipe.of([de.Rule.parse("*=bf16")]))
        >>> str(session.recipe)
        '*=bfloat16'
        """
        self._casting.use(recipe, on_progress, cancelled)

    def served_by(self, runtime: str, recipe: Recipe | None = None) -> Served:
        """Return what a runtime computes with if it quantizes the checkpoint by a recipe, by default the current one, while it
        loads it: a recipe with its scales, whether it rounds the inputs of layers, and the recipe in its own form. Nothing is cast.
        `runtime`: "vllm" or "sglang". Raises UserError for another runtime.

        >>> _ = session.cast("*.mlp", "fp8@tensor")
        >>> served = session.served_by("vllm")
        >>> [str(rule) for rule in served.recipe.rules][0], served.quantize_activations
        ('*=bfloat16', 'weights')
        >>> session.apply(served.recipe)
        """
        from dtype_engine.recipe.served import served  # few sessions need the tables of other programs
        from dtype_engine.recipe.targets.base import Context

        plan = self.plan if recipe is None else make_plan(self.tree, recipe)
        return served(Context(self.tree, plan, self.model.title, activations="weights"), runtime)

    @reading_weights
    def undo(self) -> bool:
        """Restore the previous recipe. Returns whether there was one.

        >>> _ = session.cast("*", "float16")
        >>> session.undo(), session.redo()
        (True, True)
        """
        return self._casting.undo()

    @reading_weights
    def redo(self) -> bool:
        """Apply the recipe that `undo` reverted most recently. Returns whether there was one.

        >>> session.redo()
        False
        """
        return self._casting.redo()

    def putting_back(self) -> AbstractContextManager[None]:
        """Return a context manager that undoes the casts made in its `with` block: at the end, the current recipe is applied again.

        >>> name = next(iter(session.model.weights))
        >>> with session.putting_back():
        ...     session.model.apply(session.plan.dtypes | {name: "bfloat16"})
        >>> session.model.weights[name].dtype
        'float32'
        """
        return self._casting.putting_back()

    @reading_weights
    def lost_values(self, cancelled: IsCancelled = never, plan: Plan | None = None) -> tuple[ValueLoss, ...]:
        """Find the weights in which a cast makes values infinite or zero, or saturates them. Rounding is not a loss. Returns an
        entry with the numbers of such values for each weight that has some. `plan`: the plan whose casts are examined;
        by default, the plan of the current recipe.

        >>> _ = session.cast("*", "bfloat16")
        >>> session.lost_values()
        ()
        """
        return self.model.lost_values(None if plan is None else plan.dtypes, cancelled)

    def predict(self, recipe: Recipe | None = None) -> Prediction:
        """Predict the drift of a recipe, by default the current one: the sum of the scores that the last scan gave to the weights
        that the recipe casts, in the unit of the scan. Raises UserError if there is no scan, or if the scan lacks a dtype of the
        recipe.

        >>> _ = session.scan(["bfloat16"], draws=1)
        >>> session.predict(de.Recipe.of([de.Rule.parse("*=bf16")])).value > 0
        True
        """
        scanned = self.need_scan()
        plan = self.plan if recipe is None else make_plan(self.tree, recipe)
        return predict(self.tree, plan, scanned, scanned.scores())

    def front(self, constraints: Constraints | None = None) -> ParetoFront:
        """Compute the Pareto front of the model's bytes and the drift that the last scan predicts: the recipes that no other recipe
        beats in both, smallest model first. Raises UserError if there is no scan. `constraints` name the weights that stay as
        stored, share a dtype, or may have only certain dtypes, the program that is to load the export, and whether the bytes are
        those of the whole model or those that a token reads. By default, the program is transformers for a checkpoint of
        transformers, otherwise this program.

        >>> _ = session.scan(["bfloat16"], draws=1)
        >>> len(session.front().points) > 1
        True
        """
        constraints = constraints or Constraints()
        formats = constraints.formats or self.model.loader
        return make_front(self.tree, self.need_scan().scores(), dataclasses.replace(constraints, formats=formats))

    def need_scan(self) -> ScanReport:
        """Return the result of the last scan. Raises UserError if there is none.

        >>> _ = session.scan(["bfloat16"], draws=1)
        >>> session.need_scan().dtypes
        ('bfloat16',)
        """
        if self.scanned is None:
            raise UserError("nothing was scanned yet: call scan() first, which scores the weights")
        return self.scanned

    def memory(self) -> MemoryStats:
        """Return the current memory of the weights and of the process, in bytes. `peak_rss_bytes` is the peak since the last
        measurement began. Values that the system does not report are None.

        >>> session.memory().stored_bytes
        2831232
        """
        return memory_stats(self.model, self.plan, self.kept_outputs, self.options.max_memory)

    def export(
        self,
        folder: str | Path,
        max_shard_size: int | str = "5GB",
        on_bytes: OnCast = ignore,
        cancelled: IsCancelled = never,
        force: bool = False,
        incomplete: bool = False,
        layout: str = COMPRESSED_TENSORS,
    ) -> ExportReport:
        """Write a checkpoint in the dtypes of the current recipe. The source is not changed. Returns a report with sizes in bytes
        and times in seconds.

        With the run setting `quantize_activations="weights"` (`RunSettings`), the checkpoint requests quantized activations for the
        formats in which runtimes support them. If the checkpoint stores scales of activations, as for NVFP4, or of KV caches, the
        model first runs on the inputs to find them.

        Args:
            folder: A new folder or, if the name ends in `.safetensors`, `.pth`, `.pt`, `.bin` or `.ckpt`, a new file that holds the
                weights alone.
            max_shard_size: The maximum size of each weights file, in bytes or as in "5GB".
            on_bytes: Called with the number of bytes already written and the total.
            cancelled: Called after each block of a tensor. If it returns True, no file of the export is left behind.
            force: Whether to replace a previous export in this folder, or a file, once everything is written.
            incomplete: Whether to export a checkpoint that lacks tensors.
            layout: The layout of weights with scales: "compressed-tensors", or one of `core.file_layouts`, such as "gptq".

        Raises:
            UserError: The folder can't be written or is not empty, the disk is too full, the checkpoint lacks tensors, or the
                layout can't hold a weight.
            NoForward: The export needs scales of activations or KV caches, but the model can't be run.

        Example:
            >>> report = session.export(folder / "export")
            >>> model = de.load_pretrained(folder / "export")
        """
        from dtype_engine.runtime.export import export
        from dtype_engine.runtime.export.file_layout import in_layout

        contents = in_layout(self.export_contents(cancelled), layout)
        # Weights that stay on the disk are read only once, so losses are counted while they are written.
        lost = self.lost_values(cancelled) if not self.model.memory.limited else None
        report = export(contents, Path(folder), max_shard_size, on_bytes, cancelled, force, lost, incomplete)
        notices = () if self.fitted_to is None else self.model.rounder.notices
        return dataclasses.replace(report, notices=(*report.notices, *notices))

    @reading_weights
    def verify(self, folder: str | Path, on_bytes: OnCast = ignore, cancelled: IsCancelled = never) -> VerifyReport:
        """Compare an exported folder bit for bit with this model, cast by the current recipe. Both are read by loaders that
        `export` does not use. `report.same` says whether all tensors are equal, `report.differences` which are not. `on_bytes` is
        called with the number of bytes already compared and the total. Raises UserError if the folder is no export or can't be
        read.

        >>> _ = session.cast("*.mlp", "bfloat16")
        >>> _ = session.export(folder / "checked")
        >>> session.verify(folder / "checked").same
        True
        """
        from dtype_engine.runtime.session.verify_session import verify_open

        with nullcontext() if self.model.checkpoint is not None else self.putting_back():
            options = dataclasses.replace(self.options, settings=self.settings)
            return verify_open(self.model, self.plan, options, self.calibration, Path(folder), on_bytes, cancelled)

    @reading_weights
    def export_contents(self, cancelled: IsCancelled = never) -> Contents:
        """Return the plan of an export: name, dtype and size of every tensor that `export` will write. The tensors' values are not
        computed, but the model runs if the export stores scales of activations or KV caches. Raises NoForward and UserError as
        `export` does.

        >>> session.export_contents().nbytes == session.plan.planned_bytes
        True
        """
        from dtype_engine.runtime.session.export_contents import contents_of

        return contents_of(
            self.model, self.plan, self.settings, self.need_inputs, self._behavior, cancelled, self.fitted_to
        )

    @reading_weights
    def imatrix(self, cancelled: IsCancelled = never) -> bytes:
        """Return the content of a file for `llama-quantize --imatrix`, over the inputs of `Options.calibration` or, without them,
        those on which drift is measured. A weight in `q4_k:imatrix` is rounded here by the same numbers. Raises NoForward, and
        UserError for an architecture that GGUF files can't have.

        >>> session.imatrix()[:4]
        b'GGUF'
        """
        from dtype_engine.recipe.targets.base import Context
        from dtype_engine.runtime.session.imatrix import imatrix_file

        if self._statistics is None:
            raise NoForward(self.why_no_forward or "the model can't be run")
        config = self.model.checkpoint.config if self.model.checkpoint is not None else None
        model_type = (config or {}).get("model_type")
        context = Context(self.tree, self.plan, self.model.title, model_type if isinstance(model_type, str) else None)
        return imatrix_file(self.model, context, self._statistics, cancelled)

    def need_inputs(self) -> Inputs:
        """Return the inputs on which the model is run. Raises NoForward if the model can't be run.

        >>> len(session.need_inputs().batches)
        1
        """
        if self.inputs is None:
            raise NoForward(self.why_no_forward or "the model can't be run")
        return self.inputs

    @reading_weights
    def drift(
        self, listener: MeasurementListener | None = None, cancelled: IsCancelled = never, save: Path | None = None
    ) -> DriftReport:
        """Run the reference and the candidate over the inputs, and compare their outputs.

        Args:
            listener: Receives the progress of the measurement, and decides how precise it has to be.
            cancelled: Called between module calls; ignored if there is a listener.
            save: A file to which the results of finished sequences are saved, and from which the measurement continues. Raises
                UserError if it holds another measurement, or if the model makes pictures, which are not saved.

        Returns:
            Metrics of the main output and of every module, `Options.metrics`, memory in bytes, times in seconds. `sequences` is the
            number of compared sequences.

        Example:
            >>> _ = session.cast("*", "bfloat16")
            >>> 0 < session.drift().output.max_abs < 1
            True
        """
        listener = listener or MeasurementListener(cancelled=cancelled)
        return self._drift.measure(self.need_inputs, self.plan, self.settings, listener, save, self.calibration)

    @reading_weights
    def model_card(self, report: DriftReport, readme: str = "", on_bytes: OnCast = ignore) -> str:
        """Return the text of a README.md with a model card: this session's measurement of the current recipe, and all that is
        needed to measure it again with `dtype-engine check --card`. The files of the weights are read for their hashes.

        Args:
            report: The measurement, on all inputs.
            readme: The text of an earlier README, which gets the card in place of its card or at its end.
            on_bytes: Called with the numbers of read and of all bytes of a checkpoint.

        Raises:
            UserError: The weights are in no files, not all inputs were run, the output is not finite, or the README's metadata
                can't be read.

        Example:
            >>> _ = session.cast("*.mlp", "bfloat16")
            >>> card = session.model_card(session.drift(), readme="# My model")
            >>> "# My model" in card, "| `kl_mean` |" in card
            (True, True)
        """
        from dtype_engine.reports.model_card import with_card
        from dtype_engine.runtime.session.model_card import card_of, task_of

        options = dataclasses.replace(self.options, settings=self.settings)
        card = card_of(self.model, report, self.plan, options, self.need_inputs(), self.fitted_to, on_bytes)
        return with_card(readme, "README.md", card, task_of(self.model))

    @reading_weights
    def save_logits(
        self,
        path: str | Path,
        run: Literal["reference", "candidate"] = "reference",
        force: bool = False,
        on_progress: OnProgress = ignore,
        cancelled: IsCancelled = never,
    ) -> Path:
        """Run the reference or the candidate once more over the inputs, and write the tokens and the logits to a safetensors file.
        The logits keep the dtype in which the model returns them. `Options.reference_logits` and `Options.against_logits` take such
        a file. Returns its absolute path.

        Args:
            path: The file to write.
            run: Whose outputs are written.
            force: Whether to replace a file that exists.
            on_progress: Called with the run and the numbers of finished and of all tokens.
            cancelled: Called between module calls. If it returns True, no file is left behind.

        Raises:
            UserError: The file can't be written or does not fit on the disk, or the inputs are not plain sequences of tokens.
            NoForward: The model can't be run, or its output is not a distribution for each token.

        Example:
            >>> file = session.save_logits(folder / "reference.safetensors")
            >>> de.open(options=de.Options(reference_logits=file)).drift().output.kl_mean
            0.0
        """
        listener = MeasurementListener(on_progress=on_progress, cancelled=cancelled)
        return save_logits(
            self.model, self.need_inputs(), self.settings, self._behavior, run, Path(path), force, listener
        )

    @property
    def fitted_to(self) -> FittedTo | None:
        """The calibration inputs to which the roundings of the current recipe, such as GPTQ, are fitted: those of
        `Options.calibration`, by default the inputs on which drift is measured. None if the recipe has no roundings.

        >>> _ = session.cast("*.mlp.up_proj", "int4@g32:gptq")
        >>> session.fitted_to.inputs
        '1 sequence of your prompts, 27 tokens'
        """
        return fitted_to(self.plan.dtypes.values(), self.calibration)

    @reading_weights
    def held_out(
        self,
        options: InputOptions | Inputs | None = None,
        on_progress: OnParts = ignore,
        cancelled: IsCancelled = never,
    ) -> HeldOut:
        """Measure the drift of the current recipe on other inputs than the session's: those in `options`, by default the files of
        `Options.held_out`, or what `own_answers` returned. If the recipe has roundings, it is also measured without them, since a
        rounding that was fitted to one kind of text may lose on another. `on_progress` is called with the numbers of finished and
        of all measurements. Raises UserError if there are no such inputs or they do not fit.

        >>> _ = session.cast("*.mlp.up_proj", "int4@g32:gptq")
        >>> found = session.held_out(de.Options(prompts=("def other(text): return text",)))
        >>> found.kl[0] > 0, found.kl[1] > 0
        (True, True)
        """
        if options is None:
            if not self.options.held_out:
                raise UserError(
                    "there are no held-out inputs: name files with --held-out, or in Options.held_out, or "
                    "use own_answers"
                )
            options = other_inputs(self.options, self.options.held_out)
        if isinstance(options, InputOptions):
            options = inputs_of(self.model, self.options.with_inputs(options))
        with self.putting_back():
            return measure_held_out(
                self.model, options, self.plan, self.settings, self._behavior, on_progress, cancelled
            )

    @reading_weights
    def own_answers(
        self, tokens: int = ANSWER_TOKENS, on_progress: OnParts = ignore, cancelled: IsCancelled = never
    ) -> Inputs:
        """Let the reference answer each default prompt by up to `tokens` tokens, with greedy decoding, through the model's chat
        template if it has one. Returns the prompts with their answers as inputs for `held_out`. `on_progress` is called with
        the number of tokens until now and the largest number possible. Raises NoForward also for a model that does not continue a
        text, and UserError for a model without a tokenizer.

        >>> session.own_answers(4).description
        "the model's own answers to 6 default prompts, 24 tokens, 879 with the prompts"
        """
        refuse_tokens(self.model, tokens, self.options.limits)
        with ForwardRunner(self.model, RunSettings(), cancelled, behavior=self._behavior) as runner:
            return own_answers(runner, tokens, self.options.limits, on_progress)

    @reading_weights
    def rounding_gains(
        self,
        wanted: Mapping[str, Sequence[str]] | None = None,
        on_progress: OnParts = ignore,
        cancelled: IsCancelled = never,
    ) -> tuple[WeightGain, ...]:
        """Compute by how much a rounding would lower the error of each layer's output, without casting the model. It takes a pass
        over the calibration inputs. wanted: dtypes by the weights' names, by default what the current recipe casts. A dtype without
        a rounding counts with `:gptq`, if it takes that. `on_progress` is called with the numbers of finished calibration runs and
        roundings, and of all. Raises UserError if the model has no calibration inputs or is larger than memory.

        >>> name = "model.layers.0.mlp.up_proj.weight"
        >>> [found] = session.rounding_gains({name: ["int4@g32"]})
        >>> found.dtype, found.gain > 1
        ('int4@g32:gptq', True)
        """
        if wanted is None:
            planned, weights = self.plan.dtypes, self.model.weights
            wanted = {name: (planned[name],) for name in weights if planned[name] != weights[name].info.dtype}
        return rounding_gains(self.model, wanted, on_progress, cancelled)

    def _calibrate(self) -> None:
        """Fit roundings to the session's calibration inputs from now on."""
        self.calibration = Calibration(self.model, self.options, self._behavior, self.need_inputs)
        self._statistics = SavedStatistics(self.model, self.calibration, self.options.read_only)
        self.model.rounder.calibration = self._statistics

    def _calibration_inputs(self) -> Inputs:
        """Return the inputs to which roundings are fitted. Raises NoForward if the model can't be run, UserError if they can't be
        made.
        """
        return self.need_inputs() if self.calibration is None else self.calibration.inputs

    @reading_weights
    def executions(
        self,
        executions: Sequence[Execution] = (),
        on_progress: OnParts = ignore,
        cancelled: IsCancelled = never,
    ) -> ExecutionReport:
        """Compare executions of the model as it is cast: how far its outputs move if another attention kernel, batch or decoding
        computes them with the same weights. Returns a row for each of `executions`, by default those that the device and the inputs
        allow. `on_progress` is called with the numbers of finished and of all executions. Raises NoForward if none can be run.

        >>> row, = session.executions([de.Execution(attention="eager")]).rows
        >>> row.execution, row.output.max_abs < 1e-3
        ('attention=eager', True)
        """
        inputs = self.need_inputs()
        wanted = tuple(executions) or usual_executions(self.model, inputs)
        return compare_executions(
            self.model, inputs, self.plan, self.settings, self._behavior, wanted, on_progress, cancelled
        )

    @reading_weights
    def causes(
        self, on_progress: OnParts = ignore, cancelled: IsCancelled = never, on_causes: OnCauses = ignore
    ) -> AttributionReport:
        """Attribute the drift of the current recipe to modules. For each module, the model runs with this module as the recipe
        casts it and all other modules as in the reference run. In a model with very many modules, some are measured together, as a
        subtree. Returns the drift that each module causes, largest first, and the sum. Raises UserError under `torch.autocast`.

        `on_progress` is called with the numbers of finished and of all measurements, and `on_causes` after each measurement with
        the contributions found so far.

        >>> _ = session.cast("*.layers.0.mlp", "int8")
        >>> [part.name.split(".")[-2] for part in session.causes().causes]
        ['mlp', 'mlp', 'mlp']
        """
        return self.attribution().report(on_progress, cancelled, on_causes=on_causes)

    def attribution(self) -> Attribution:
        """Return an `Attribution`, which measures how much of the current recipe's drift each module causes. If an earlier
        attribution for the same recipe, settings and inputs was cancelled, the new one continues where it stopped.

        >>> session.attribution().rules == tuple(map(str, session.recipe.rules))
        True
        """
        rules, inputs = tuple(map(str, self.recipe.rules)), self.need_inputs()
        if self._parts is None or self._parts[:2] != (self.recipe, self.settings) or self._parts[2] is not inputs:
            self._parts = self.recipe, self.settings, inputs, {}
        return Attribution(self.model, inputs, self.settings, rules, self._behavior, self._parts[3])

    @reading_weights
    def floor(self, on_progress: OnParts = ignore, cancelled: IsCancelled = never) -> NoiseFloor:
        """Measure the noise floor: the drift between two reference runs that add the same numbers in a different order. Returns the
        worst value of each metric among all orders that were tried. The floor is measured only once for the current inputs.
        `on_progress` is called with the number of finished runs and an estimate of the number of all runs.

        >>> session.floor() is session.floor()
        True
        """
        inputs, settings = self.need_inputs(), RunSettings(classes_dim=self.settings.classes_dim)
        if self._floor is None or self._floor[0] is not inputs or self._floor[1] != settings:
            floor = measure_noise_floor(self.model, inputs, self._behavior, on_progress, cancelled, settings)
            self._floor = inputs, settings, floor
        return self._floor[2]

    @reading_weights
    def merge_error(self, on_progress: OnParts = ignore, cancelled: IsCancelled = never) -> MergeError | None:
        """Measure what the merge of the model's PEFT adapter loses if the merged weights are rounded to the dtypes of its base. No
        rule changes it. Returns None if the model has no adapter, or if its base is in float32. `on_progress` is called with the
        number of weights that were read and of all. Raises UserError, Cancelled.

        >>> session.merge_error() is None
        True
        """
        checkpoint = self.model.checkpoint
        return None if checkpoint is None else merge_error(checkpoint, cancelled, on_progress)

    def wants_candidate_floor(self, output: OutputDrift) -> bool:
        """Return whether to measure `candidate_floor` after a drift: as `Options.floor` says, and with "auto" if the drift may be
        within it and the model is not run from the disk, where its passes take too long.

        >>> _ = session.cast("*", "bfloat16")
        >>> session.wants_candidate_floor(session.drift().output)
        True
        """
        option, memory = self.options.floor, self.model.memory
        from_disk = memory.limited and not memory.keeps_pages
        return option == "always" or (option == "auto" and near_kernels(output) and not from_disk)

    @reading_weights
    def candidate_floor(self, on_progress: OnParts = ignore, cancelled: IsCancelled = never) -> NoiseFloor | None:
        """Measure by how much another attention kernel and another batch change the output of the candidate, in its own dtypes: as
        `floor` does for the reference. Returns None if nothing in the candidate computes in 16 bits, so that `floor` says it, or if
        the candidate's outputs come from a file.

        >>> session.candidate_floor() is None
        True
        """
        if not self.in_16_bits or (self.given_logits is not None and self.given_logits.run == "candidate"):
            return None
        return measure_noise_floor(
            self.model, self.need_inputs(), self._behavior, on_progress, cancelled, self.settings, "candidate"
        )

    @property
    def in_16_bits(self) -> bool:
        """Whether something in the candidate may compute in 16 bits.

        >>> _ = session.cast("*.mlp", "bfloat16")
        >>> session.in_16_bits
        True
        """
        used = {*self.plan.dtypes.values(), self.settings.autocast, self.settings.compute}
        return bool({"bfloat16", "float16"} & used)

    @reading_weights
    def nonfinite(
        self, report: DriftReport, on_trial: OnParts = ignore, cancelled: IsCancelled = never
    ) -> NonFiniteDiagnosis | None:
        """Find the module in which values first become infinite or NaN, and rules that prevent this. `report` is this session's
        measurement of the current recipe. Returns None if the report has no such values. `on_trial` is called with the number of
        sets of rules already tried and the number of all sets.

        >>> session.nonfinite(session.drift()) is None
        True
        """
        output, inside = report.output, any(each.nonfinite for each in report.modules)
        if self._drift.meter is None or not (output.nonfinite or output.nonfinite_reference or inside):
            return None
        with self.putting_back():
            meter = self._drift.meter
            return diagnose_nonfinite(meter, self.tree, self.recipe, report.modules, output, on_trial, cancelled)

    @reading_weights
    def loss_remedy(
        self, report: DriftReport | None, on_trial: OnParts = ignore, cancelled: IsCancelled = never
    ) -> LossRemedy | None:
        """Find rules that avoid the losses of the current recipe: values that become infinite or zero, or saturate. Returns None if
        values are only rounded.

        Args:
            report: A measurement of the current recipe, for comparison with the drift under the new rules. If None, the rules are
                returned without a measurement.
            on_trial: Called with the number of sets of rules already tried and the number of all sets.

        Example:
            >>> session.loss_remedy(None) is None
            True
        """

        def count(name: str, dtype: str) -> ValueLoss | None:
            return self.model.weights[name].count_loss(dtype, cancelled)

        meter = self._drift.meter
        if report is None or meter is None:
            reason = self.no_forward or "the recipe was not measured"
            return untried_remedy(self.tree, self.plan, self.lost_values(cancelled), count, reason)
        with self.putting_back():
            return tried_remedy(meter, self.tree, self.plan, report, count, on_trial, cancelled)

    @reading_weights
    def weight_differences(self, cancelled: IsCancelled = never) -> tuple[ModuleDrift, ...]:
        """Compare each weight, as it is currently cast, with the same weight of the checkpoint that `Options.reference` names.
        Returns the SQNR and other figures of each weight, in the model's order, or () if `Options.reference` names no checkpoint.

        >>> session.weight_differences()
        ()
        """
        return tuple(reference_differences(self.model, cancelled))

    @reading_weights
    def flow(self, cancelled: IsCancelled = never) -> tuple[ImplicitCastStats, ...]:
        """Find all implicit casts (changes of dtype inside operations) in a forward pass over the first input. Returns the number
        of cast elements and the number of casts, for each module, operation and pair of dtypes (before and after the cast).

        >>> _ = session.cast("*.mlp", "bfloat16")
        >>> len(session.flow()) > 0
        True
        """
        with ForwardRunner(self.model, self.settings, cancelled, behavior=self._behavior) as runner:
            return implicit_casts(runner, self.need_inputs().batches[0])

    @reading_weights
    def generate(
        self,
        tokens: int = 32,
        on_tokens: OnTokens = ignore,
        cancelled: IsCancelled = never,
        prompt: str | None = None,
        on_text: OnText = ignore,
    ) -> tuple[Generation, ...]:
        """Continue the user's prompts, or else the first input, in a reference run and in a candidate run, by greedy decoding.
        Returns both texts for each prompt. Raises NoForward also for a model that can't generate, and UserError for more `tokens`
        than the model has positions.

        Args:
            tokens: The maximum number of tokens to generate for each prompt in each run.
            on_tokens: Called with the run ("reference" or "candidate"), the number of generated tokens, and the total maximum.
            cancelled: Called after every token.
            prompt: A text to continue instead of the inputs' texts. Pictures and sounds among the inputs stay.
            on_text: Called after every token with a function that returns the texts of the current prompt until now.

        Example:
            >>> session.generate(2)[0].differs  # nothing is cast
            False
        """
        refuse_tokens(self.model, tokens, self.options.limits)
        with ForwardRunner(self.model, self.settings, cancelled, behavior=self._behavior) as runner:
            inputs = self.need_inputs()
            runner.calibrate_caches(inputs.batches)
            if prompt is not None:
                inputs = inputs_of(
                    self.model, dataclasses.replace(self.options, prompts=(prompt,), texts=(), tensors=None)
                )
            return generate(runner, inputs, tokens, on_tokens, on_text)

    @reading_weights
    def token_choices(
        self,
        tokens: int = TOKENS,
        on_step: OnTexts = ignore,
        cancelled: IsCancelled = never,
        prompt: str | None = None,
        on_text: OnText = ignore,
    ) -> TokenReport:
        """Let the reference continue prompts by greedy decoding, and ask at each token of these texts whether the candidate would
        choose the same token: in one pass over the prompt and the text, so that an early difference does not change the rest.

        The prompts are the user's or, without any, the built-in ones, through the model's chat template if it has one. Raises
        NoForward also for a model that can't generate text, and UserError for prompts and texts longer than the model's positions.

        Args:
            tokens: The maximum number of tokens in each text.
            on_step: Called with the name of a step, and how much of it is done.
            cancelled: Called after every token and between module calls.
            prompt: A text to continue instead of the inputs' texts. Pictures and sounds among the inputs stay.
            on_text: Called after every token with a function that returns the reference's current text until now.

        Example:
            >>> _ = session.cast("*.mlp", "int4@g32")
            >>> found = session.token_choices(16)
            >>> found.tokens, found.counts["identical"] > found.counts["different"]
            (16, True)
        """
        refuse_tokens(self.model, tokens, self.options.limits)
        inputs, options = self.need_inputs(), self.options
        if self.given_logits is not None:
            raise UserError("token_choices runs both models: leave the file of outputs out")
        if prompt is not None:
            options = dataclasses.replace(options, prompts=(prompt,), texts=(), tensors=None)
        with ForwardRunner(self.model, self.settings, cancelled, behavior=self._behavior) as runner:
            runner.calibrate_caches(inputs.batches)
            given = inputs if prompt is None else inputs_of(self.model, options)
            prompts = text_prompts(self.model, given, options, tokens)
            texts = written_texts(runner, prompts, tokens, on_step, on_text)
            passes = passes_over(runner, texts, on_step)
        runs: dict[Run, RunSettings] = {}
        if options.floor == "always" or (options.floor == "auto" and passes.differ(texts)):
            runs["reference"] = RunSettings(classes_dim=self.settings.classes_dim)
            runs |= {"candidate": self.settings} if self.in_16_bits else {}
        floors = text_floors(self.model, texts, runs, self._behavior, on_step, cancelled)
        return token_report(self.model, self.plan, prompts, texts, passes, floors)

    @reading_weights
    def activation_memory(self, context: int, batch: int = 1) -> ActivationMemory:
        """Measure the memory that a forward pass over `batch` prompts of `context` random tokens needs in addition to the weights
        and the KV cache. The pass computes in the dtype that most weights have under the recipe or, if torch can't compute in this
        dtype, in the one that the model's configuration names. Returns the bytes at the peak, and the module that runs at that
        time.

        >>> session.activation_memory(64).module
        'model.layers.5.mlp.up_proj'
        """
        return measured_activations(self.model, self._casting, context, batch)

    def estimated_activations(
        self, contexts: Sequence[int], batch: int = 1, cancelled: IsCancelled = never
    ) -> tuple[ActivationMemory, ...]:
        """Return an upper estimate of what `activation_memory` measures for each of several context lengths, without running the
        model. Raises NoForward if the operations of a forward pass depend on values, or if the model is Python code.

        >>> [peak.context for peak in session.estimated_activations([64, 128])]
        [64, 128]
        """
        return estimated_activations(self.model, self.plan, self.options, contexts, batch, cancelled)

    @reading_weights
    def speed(
        self, on_passes: OnPasses = ignore, cancelled: IsCancelled = never, repeats: int = REPEATS
    ) -> SpeedReport:
        """Time forward passes over all inputs with the weights in float32, as stored, and as cast. The variant as stored is left
        out if it equals one of the others. Returns the seconds per pass: the median, fastest and slowest of each variant. After one
        warm-up pass, `repeats` passes of each variant are timed. If they take long, fewer are timed, but at least 3. `on_passes` is
        called with the variant that is being timed, the number of finished passes, and the number of all passes.

        >>> [row.what for row in session.speed(repeats=3).rows]
        ['reference', 'candidate']
        """
        with ForwardRunner(self.model, self.settings, cancelled, watch=False, behavior=self._behavior) as runner:
            return measure_speed(runner, self.need_inputs(), self.plan, on_passes, repeats)

    @reading_weights
    def expert_tokens(
        self, on_run: Callable[[], object] = ignore, cancelled: IsCancelled = never
    ) -> tuple[tuple[ExpertTokens, ...], tuple[str, ...]]:
        """Count the tokens of the inputs that the reference's routers send to each expert. Returns (the counts of each module of
        experts, notices about modules whose experts can't be told apart); both are empty for a model without experts, which is not
        run. `on_run` is called after each sequence.

        >>> session.expert_tokens()
        ((), ())
        """
        return expert_tokens(self.model, self.need_inputs(), self._behavior, on_run, cancelled)

    @reading_weights
    def scan(
        self,
        dtypes: Sequence[str] = (),
        draws: int | None = None,
        exact: bool = False,
        save: Path | None = None,
        on_progress: OnStep = ignore,
        on_estimate: OnEstimate = ignore,
        cancelled: IsCancelled = never,
    ) -> ScanReport:
        """Score how much drift each weight would add in each of `dtypes`, if everything else stayed as in the reference run.
        Returns the scores in the unit that the report names, such as nats per position.

        The current recipe does not affect the scan. A cancelled scan continues when it is started again with the same arguments.
        Raises UserError if the file `save` holds a scan with other arguments, inputs or settings, or of another model.

        Args:
            dtypes: The dtypes in which weights are scored. By default those of the program that loads an export of the model, such
                as transformers (`search.families`). In a dtype such as "int4@g32:gptq", weights are first rounded to the
                calibration inputs.
            draws: The number of backward passes per sequence; by default 24 divided by the number of sequences, but at least 4.
            exact: Whether to measure each weight in each dtype separately, instead of estimating.
            save: A file in which the scan is saved after every sequence, and from which it continues.
            on_progress: Called with the name of the step, the number of finished operations, and the number of all operations. If
                `exact` is set, measurements are counted instead of operations.
            on_estimate: Called with intermediate reports.

        Example:
            >>> scan = session.scan(["bfloat16"], draws=1)
            >>> session.search(budget=2_000_000).planned_bytes <= 2_000_000
            True
        """
        task = self.scan_task(dtypes or FAMILIES[self.model.loader].dtypes, draws, exact, save)
        with self.putting_back() if exact else nullcontext():
            self.scanned = task.run(on_progress, on_estimate, cancelled)
            return self.scanned

    def scan_task(self, dtypes: Sequence[str], draws: int | None, exact: bool, save: Path | None) -> ScanTask:
        """Return the scan that `scan` runs with these arguments, as an object that can be run in parts. At least one dtype is
        needed. Equal arguments return the same object. Raises NoForward and UserError as `scan` does.

        >>> session.scan_task(["bfloat16"], None, False, None).pending()
        [0]
        """
        return self._scan.get(self.model, self.need_inputs(), self.settings, dtypes, draws, exact, save)

    def search(
        self,
        budget: int | str | None = None,
        max_drift: float | None = None,
        constraints: Constraints | None = None,
        measure: bool = False,
        cancelled: IsCancelled = never,
    ) -> FoundRecipe:
        """Find the best recipe under one limit, either `budget` or `max_drift`, with the scores of the last scan. Returns the
        recipe, which `apply` takes, its bytes and drift, and the Pareto front. Raises UserError if there is no scan, and OutOfReach
        if no recipe meets the limit.

        Args:
            budget: The maximum size of the whole model, in bytes, as "12GiB", or as "45%" of the stored bytes. The result is the
                recipe with the lowest predicted drift. With `Constraints(by="active")`, it limits the bytes of weights that a token
                reads.
            max_drift: The maximum predicted drift, in the unit of the scan. The result is the recipe with the fewest bytes.
            constraints: As for `front`. With a context length, the bytes include the KV caches, whose formats are then chosen among
                those that were scanned.
            measure: Whether to also apply the recipe, which then stays, and measure its drift.

        Example:
            >>> _ = session.scan(["bfloat16"], draws=1)
            >>> found = session.search(budget="60%")
            >>> session.apply(found)
            >>> session.plan.planned_bytes == found.planned_bytes
            True
        """
        front = self.front(constraints)
        whole = self.tree.stored_bytes if front.by == "bytes" else self.tree.active_bytes() or 0
        most = parse_bytes(budget, whole) if isinstance(budget, str) else budget
        solution = solved(front, most, max_drift, self.tree, self.need_scan().scores(), constraints)
        recipe = minimize(self.tree, solution.dtypes)
        plan, context = make_plan(self.tree, recipe), None if constraints is None else constraints.context
        if measure:
            self.apply(recipe, cancelled=cancelled)
        report = self.drift(cancelled=cancelled) if measure else None
        lost = self.lost_values(cancelled, plan)
        return search_report(self.model, self.need_scan().unit, front, solution, plan, report, context, lost)

    @reading_weights
    def use_inputs(self, options: InputOptions, cancelled: IsCancelled = never) -> None:
        """Run the model on the inputs in `options` from now on. The session's other options stay, even if `options` is an `Options`
        that has them, too. The last scan is discarded. Roundings stay fitted to the inputs to which they were first fitted. To
        check the inputs, a reference run over one batch is done first. If the user supplied tensors, the run covers one batch of
        each shape.

        Raises UserError if the inputs can't be created, do not fit the model, or make the run fail. After an error or a
        cancelled run, nothing is changed.

        >>> session.use_inputs(de.Options(prompts=("one short prompt",)))
        """
        options = self.options.with_inputs(options)
        inputs = tried_inputs(self.model, options, self.settings, self._behavior, cancelled)
        self.inputs, self.options, self.why_no_forward = inputs, options, None
        self._drift, self.scanned = DriftMeasurements(self.model, options, self._behavior), None
        self._behavior.calibrations.clear()
        self._scan = LastScan(self._calibration_inputs)
        if self.calibration is None:
            self._calibrate()

    @property
    def inputs_reading(self) -> InputsSummary | None:
        """A summary of the inputs, with an entry for each batch, or None if the model can't be run.

        >>> len(session.inputs_reading.batches)
        1
        """
        return summarize(self.inputs) if self.inputs is not None else None

    @property
    def kept_outputs(self) -> tuple[int, int] | None:
        """The number of bytes of the module outputs that are kept for later measurements, and the limit for this number. None
        before the first measurement on the current inputs.

        >>> de.open().kept_outputs  # nothing is measured
        """
        return self._drift.kept_outputs
