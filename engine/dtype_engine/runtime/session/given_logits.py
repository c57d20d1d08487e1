"""Measures the drift between a session's model and the outputs in a file, and writes such a file."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from dtype_engine.core.errors import UserError
from dtype_engine.core.input_args import check_logits
from dtype_engine.core.options import Options, RunSettings
from dtype_engine.core.text import printable
from dtype_engine.core.units import plural
from dtype_engine.recipe import Plan
from dtype_engine.recipe.state_words import state_notices
from dtype_engine.results.drift import DriftReport, Seconds
from dtype_engine.results.given_logits import GivenLogits
from dtype_engine.runtime.inputs import Batch, Inputs
from dtype_engine.runtime.inputs.preprocessing import text_config, tokenizer_of
from dtype_engine.runtime.inputs.text import with_next_tokens, without_cache
from dtype_engine.runtime.inputs.validate import check_fits
from dtype_engine.runtime.logits.forms import open_logits
from dtype_engine.runtime.logits.outputs import LogitsFile
from dtype_engine.runtime.logits.own_form import write_own
from dtype_engine.runtime.measure.draft_head import asks_for_drafts, not_measured
from dtype_engine.runtime.measure.drift import step_notices
from dtype_engine.runtime.measure.listener import MeasurementListener
from dtype_engine.runtime.measure.token_outputs import compare_with, token_outputs, tokens_of
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.modes.reference import reference_name
from dtype_engine.runtime.passes.model_behavior import ModelBehavior, Run
from dtype_engine.runtime.session.process_memory import memory_stats


@dataclass(frozen=True, slots=True)
class Given:
    """The file of outputs that the options of a session name."""

    file: LogitsFile
    inputs: Inputs
    """The tokens of the file, on which the model runs."""
    about: GivenLogits


def given_logits(model: LiveModel, options: Options) -> Given | None:
    """Open the file of outputs that the options name. Returns None if they name none. Raises UserError if the file can't be read or
    does not fit the model, or if other options exclude it.
    """
    check_logits(options)
    path = options.against_logits or options.reference_logits
    if path is None:
        return None
    run: Run = "candidate" if options.against_logits is not None else "reference"
    file = open_logits(path, options.limits, _text_beginnings(model))
    tokens = file.tokens[: options.sequences]
    batches = tuple(Batch(kwargs={"input_ids": ids[None]}) for ids in tokens)
    for number, batch in enumerate(batches, 1):
        check_fits(model, batch, f"{path}, sequence {number}")
    name = printable(path.name, 60)
    described = f"{plural(len(batches), 'sequence')} of {name}, {plural(sum(map(len, tokens)), 'token')}"
    inputs = Inputs(batches, described, made=False, made_of=(f"tokens of {name}",))
    inputs = without_cache(model, with_next_tokens(model, inputs))
    return Given(file, inputs, GivenLogits(run, name, file.form, file.are_logits, file.bounds))


def _text_beginnings(model: LiveModel) -> frozenset[int]:
    """Return the ids of the tokens that begin a text, as the model's configuration and its tokenizer name them."""
    config = getattr(model.module, "config", None)
    named = [] if config is None else [config, text_config(config), tokenizer_of(model)]
    ids = (getattr(each, "bos_token_id", None) for each in named)
    return frozenset(each for each in ids if isinstance(each, int))


def measure_given(
    model: LiveModel,
    given: Given,
    options: Options,
    plan: Plan,
    settings: RunSettings,
    behavior: ModelBehavior,
    listener: MeasurementListener,
) -> DriftReport:
    """Return the drift between the outputs of a file and those of the model, which runs as the reference or, cast by `plan`, as the
    candidate. Modules are not compared. Raises NoForward, KernelError, Cancelled, and UserError.
    """
    about = given.about
    if about.run == "candidate" and plan.recipe.rules:
        raise UserError(
            "--against-logits: the candidate is the file, so no rules apply: leave out --cast, --recipe, --preset"
        )
    run: Run = "reference" if about.run == "candidate" else "candidate"
    outputs = token_outputs(model, given.inputs, settings, behavior, run, listener)
    totals, seconds = compare_with(given.file, about.run, given.inputs.batches, outputs, listener, settings.acceptance)
    output = totals.output
    if not about.are_logits:
        output = dataclasses.replace(output, mean_abs=None, max_abs=None, rel_l2=None, sqnr_db=None, cosine=None)
    no_head = not_measured("a file has the outputs, not the hidden states")
    said = [str(settings)] if settings != RunSettings() else []
    return DriftReport(
        model=model.title,
        device=str(model.device),
        reference=reference_name(model) if run == "reference" else f"outputs in {about.file}",
        rules=tuple(map(str, plan.recipe.rules)),
        settings=", ".join((*said, str(about))),
        inputs=given.inputs.description,
        output_name=totals.output_name,
        output=output,
        modules=(),
        modules_sequences=0,
        memory=memory_stats(model, plan, None, options.max_memory),
        seconds=Seconds(seconds) if run == "reference" else Seconds(None, seconds),
        sequences=totals.extent,
        notices=(
            *model.notices,
            *totals.notices(output),
            *state_notices(model.tree, plan),
            *step_notices(model, given.inputs, totals.numbers, "the candidate"),
            *([no_head] if asks_for_drafts(model, settings) else ()),
        ),
        lost=model.lost_values(None, listener.cancelled),
        coverage=model.coverage,
    )


def save_logits(
    model: LiveModel,
    inputs: Inputs,
    settings: RunSettings,
    behavior: ModelBehavior,
    run: Run,
    path: Path,
    replace: bool,
    listener: MeasurementListener,
) -> Path:
    """Do the work of `Session.save_logits`."""
    tokens = [tokens_of(batch).to(torch.int64).cpu() for batch in inputs.batches]
    with closing(token_outputs(model, inputs, settings, behavior, run, listener)) as outputs:
        return write_own(path, replace, model.title, tokens, (each.logits[0] for each in outputs))
