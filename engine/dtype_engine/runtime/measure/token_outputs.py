"""Runs a model over sequences of tokens for the logits of each, and compares them with those in a file."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from typing import NamedTuple

import torch

from dtype_engine.core.errors import NoForward, UserError
from dtype_engine.core.options import RunSettings
from dtype_engine.runtime.execution.executor import Executor
from dtype_engine.runtime.inputs import Batch, Inputs
from dtype_engine.runtime.logits.outputs import LogitsFile, Outputs
from dtype_engine.runtime.measure.listener import MeasurementListener
from dtype_engine.runtime.measure.running_totals import RunningTotals
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.numerics.compare.merged import merged_figures
from dtype_engine.runtime.numerics.compare.metrics import OutputMetrics
from dtype_engine.runtime.numerics.compare.sequence_figures import SequenceFigures, sequence_figures
from dtype_engine.runtime.passes.class_dimensions import classes_dimension
from dtype_engine.runtime.passes.forward_pass import ModuleObserver
from dtype_engine.runtime.passes.model_behavior import ModelBehavior, Run
from dtype_engine.runtime.passes.one_pass import PassOptions
from dtype_engine.runtime.passes.outputs import main_output
from dtype_engine.runtime.passes.runner import ForwardRunner

_PLAIN_ARGUMENTS = {"input_ids", "attention_mask", "use_cache"}


class TokenOutput(NamedTuple):
    """The output of one sequence."""

    name: str
    logits: torch.Tensor
    """[1, positions, classes], in the dtype in which the model returned them."""
    seconds: float


def tokens_of(batch: Batch) -> torch.Tensor:
    """Return the tokens of a batch that is one sequence, int64 [positions]. Raises UserError for any other batch."""
    ids, mask = batch.kwargs.get("input_ids"), batch.kwargs.get("attention_mask")
    padded = isinstance(mask, torch.Tensor) and not bool(mask.bool().all())
    plain = not batch.args and _PLAIN_ARGUMENTS.issuperset(batch.kwargs) and not padded
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or len(ids) != 1 or not plain:
        raise UserError("logits are saved of inputs that are sequences of tokens, one at a time and without padding")
    return ids[0]


def token_outputs(
    model: LiveModel,
    inputs: Inputs,
    settings: RunSettings,
    behavior: ModelBehavior,
    run: Run,
    listener: MeasurementListener,
) -> Generator[TokenOutput, None, None]:
    """Run the reference or the candidate over sequences of tokens, and yield the output of each. Raises NoForward, also for a model
    whose output is not a distribution for each token, KernelError, Cancelled.
    """
    batches = inputs.batches
    with ForwardRunner(model, settings, listener.cancelled, behavior=behavior) as runner:
        if run == "candidate":
            runner.calibrate_caches(batches)
        execution = settings.execution if run == "candidate" else settings.reference_execution
        executor, done, total = Executor(runner, batches), 0, sum(batch.elements for batch in batches)
        for number, batch in enumerate(batches):
            listener.on_progress(run, done, total)
            ran = executor.run(run, execution, number, PassOptions(watched=frozenset()), ModuleObserver())
            name, output = main_output(ran.output)
            dimension = classes_dimension(model.module, name, output, settings.classes_dim)
            if output.ndim != 3 or dimension != 2 or output.shape[:2] != batch.kwargs["input_ids"].shape:
                raise NoForward(
                    f"the output of {model.title} ({name}, {tuple(output.shape)}) has no logits for each token, so there are "
                    "none to compare with a file"
                )
            done += batch.elements
            yield TokenOutput(name, output, ran.seconds)
        listener.on_progress(run, total, total)


def compare_with(
    file: LogitsFile, file_is: Run, batches: tuple[Batch, ...], outputs: Generator[TokenOutput, None, None],
    listener: MeasurementListener, acceptance: bool = False,
) -> tuple[RunningTotals, float]:  # fmt: skip
    """Compare a model's outputs with those of a file, until they are as precise as the listener requires. Returns the totals and
    the duration of the model's passes in seconds.

    file_is: whether the file has the outputs of the reference or of the candidate. batches: the inputs, one sequence each.
    acceptance: whether to compute the acceptance, which needs the probability of every token. Raises what `token_outputs` and
    `LogitsFile.outputs` raise.
    """
    totals, seconds = None, 0.0
    with closing(outputs):
        for number, (batch, (name, logits, lasted)) in enumerate(zip(batches, outputs, strict=True)):
            if totals is None:
                totals = RunningTotals(name, logits, OutputMetrics(2, acceptance=acceptance), len(batches))
            read = file.outputs(number, logits.shape[-1])
            figures = _figures(read, file_is, logits[0], batch.next_tokens, acceptance)
            if figures.positions is not None:
                figures.positions.position = torch.arange(read.first + 1, read.first + 1 + figures.rows)
            totals.add_figures(number, figures)
            seconds += lasted
            if listener.on_sequence is not None:
                listener.on_sequence(totals)
            precision = None if listener.precision is None else listener.precision()
            if precision is not None and totals.extent.is_within(precision):
                break
    assert totals is not None  # a file of outputs has at least one sequence
    return totals, seconds


def _figures(
    read: Outputs, file_is: Run, logits: torch.Tensor, next_tokens: torch.Tensor | None, acceptance: bool
) -> SequenceFigures:
    """Return the figures of a sequence at the positions that the file has. logits: of the model, [positions, classes]. There is no
    acceptance if classes are merged: it would be an upper bound.
    """
    rows = slice(read.first, read.first + len(read.values))
    labels = None if next_tokens is None else next_tokens[0, rows]
    if read.ids is not None:
        return merged_figures(read.values, read.ids, logits[rows], labels, file_is)
    if read.clipped is not None and bool(read.clipped.any()):
        # Half of a large vocabulary may be clipped. Together, the clipped values exceed what they stand for by far.
        unknown = read.clipped if labels is None else read.clipped.scatter(1, labels.cpu().clamp(min=0)[:, None], False)
        return merged_figures(read.values.masked_fill(unknown, -torch.inf), None, logits[rows], labels, file_is)
    given = read.values.to(logits.device)
    pair = (given, logits[rows]) if file_is == "reference" else (logits[rows], given)
    return sequence_figures(*pair, distribution=True, labels=labels, acceptance=acceptance)
