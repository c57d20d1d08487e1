"""Makes the model card of a measurement."""

from __future__ import annotations

from collections.abc import Callable

from dtype_engine.checkpoint import Checkpoint
from dtype_engine.checkpoint.source import Source, locate_by
from dtype_engine.checkpoint.weights_hash import file_sha256, weights_sha256
from dtype_engine.core.callbacks import ignore
from dtype_engine.core.errors import UserError
from dtype_engine.core.options import InputOptions, Options
from dtype_engine.recipe import Plan
from dtype_engine.recipe.file import RecipeFile
from dtype_engine.recipe.model_card import FILE, PROMPT, Conditions, ModelCard, measured_entries
from dtype_engine.reports.versions import versions
from dtype_engine.results.drift import DriftReport
from dtype_engine.results.model_card import card_figures
from dtype_engine.results.rounding import FittedTo
from dtype_engine.runtime.inputs import Inputs
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.scan.saved import hash_of

OnBytes = Callable[[int, int], None]


def card_of(
    model: LiveModel,
    report: DriftReport,
    plan: Plan,
    options: Options,
    inputs: Inputs,
    fitted_to: FittedTo | None,
    on_bytes: OnBytes = ignore,
) -> ModelCard:
    """Return the card of `report`, a measurement of a plan.

    options: those with which the model was opened, with the settings of the measurement. fitted_to: the inputs to which the
    roundings of the plan are fitted, or None. on_bytes: called with the numbers of read and of all bytes of a checkpoint, whose
    files are read for a hash. Raises UserError if no card can say what was measured.
    """
    if not report.sequences.whole:
        raise UserError("a model card needs a measurement on all inputs: leave --precision out")
    if not report.output.is_finite:
        raise UserError(f"a model card has no figures of an output that is not finite: {report.output.nonfinite_text}")
    if model.checkpoint is None or not model.checkpoint.files:
        raise UserError(f"a model card names the weights by a hash of their files, and {model.title} has none")
    reference, own_hash = options.reference, weights_sha256(model.checkpoint, on_bytes)
    base, base_hash = model.checkpoint, own_hash
    if options.reference_model is not None:
        source = locate_by(options.reference_model, options)
        base = need_files(source)
        reference, base_hash = source.title, weights_sha256(base, on_bytes)
    conditions = Conditions(
        reference,
        base_hash,
        report.inputs_run,
        hash_of(inputs),
        report.device,
        own_hash if options.reference_model is not None else None,
        options.sequence_length,
        options.sequences,
        options.chat,
    )
    entries = measured_entries(conditions, _inputs(options), versions())
    return ModelCard(
        card_figures(report, base.tree().stored_bytes, plan.planned_bytes),
        RecipeFile(plan.recipe, model.title, options.settings, entries, fitted_to=fitted_to),
    )


def need_files(source: Source) -> Checkpoint:
    """Return the checkpoint that a source is. Raises UserError for code and for a model whose weights are only on a hub."""
    checkpoint = source.open()
    if checkpoint is None:
        raise UserError(f"{source.title} is code, and a model card is about the files of a checkpoint: name one")
    checkpoint.need_values()
    return checkpoint


def _inputs(options: InputOptions) -> dict[str, str]:
    """Return the entries of a card for the files and the prompts with which a model is run."""
    prompts = {f"{PROMPT}{number}": text for number, text in enumerate(options.prompts, 1)}
    files = (*options.texts, *options.images, *options.audio, *((options.tensors,) if options.tensors else ()))
    return prompts | {f"{FILE}{path.name}": file_sha256(path) for path in files}


def task_of(model: LiveModel) -> str:
    """Return the task of a model as a hub names it: "text-generation", or "other", since a card needs no more."""
    name = type(model.module).__name__
    return "text-generation" if name.endswith(("ForCausalLM", "LMHeadModel")) else "other"
