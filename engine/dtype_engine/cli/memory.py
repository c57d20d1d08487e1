"""`dtype-engine memory`: computes the memory that serving a model takes, from headers and an estimate of its activations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import click

from dtype_engine.checkpoint import Checkpoint
from dtype_engine.checkpoint.source import Source
from dtype_engine.cli.options import (
    ModelCommand,
    bandwidth_option,
    batch_option,
    byte_count,
    context_option,
    json_option,
)
from dtype_engine.cli.program import NO, answer, print_json, say
from dtype_engine.cli.request import RunRequest
from dtype_engine.core import dtypes
from dtype_engine.core.errors import NoForward, UserError
from dtype_engine.core.kv_formats import parse_of_tokens
from dtype_engine.recipe.serving_memory import Load, decoding, default_context, serving_dtype, serving_memory
from dtype_engine.results.as_json import as_json
from dtype_engine.results.serving_memory import ActivationMemory


@click.command(cls=ModelCommand, runs=False)
@context_option
@batch_option
@click.option(
    "--budget",
    type=byte_count,
    metavar="BYTES",
    help="Also print the longest context that fits in this amount of memory, such as 24GiB. The exit status is 1 if the "
    "context of --context (or its default) does not fit.",
)
@click.option(
    "--kv",
    metavar="FORMAT",
    help="The dtype of the KV caches for which no rule sets one, such as fp8. By default, the dtype in which the model "
    "computes.",
)
@click.option(
    "--activations",
    type=click.Choice(["estimate", "measure", "none"]),
    default="estimate",
    show_default=True,
    help="How to determine the peak memory of activations in a forward pass over the whole context. estimate: follow the "
    "pass without computing it, from headers alone. measure: load the model and run the pass. none: leave activations out, "
    "which is fastest.",
)
@bandwidth_option
@json_option
def memory(
    request: RunRequest,
    context: int | None,
    batch: int,
    budget: int | None,
    kv: str | None,
    activations: str,
    bandwidth: float | None,
    as_object: bool,
) -> int:
    """Compute the memory that MODEL needs for inference: for its weights, its KV cache, and the peak of its activations."""
    source = request.locate()
    planned = request.plan(source)
    tree, plan, checkpoint = planned.tree, planned.plan, planned.checkpoint
    form = parse_of_tokens(kv) if kv is not None else None
    if form == dtypes.STORED:
        raise UserError("--kv stored: leave out --kv for the dtype in which the model computes")
    context = context or default_context(tree)
    compute_memory = partial(serving_memory, source.title, tree, plan, Load(context, batch, form), budget)
    compute = serving_dtype(tree.totals(plan.dtypes)[""], tree.kv_cache)
    notes: tuple[str, ...] = ()
    try:
        say("following a pass" if activations == "estimate" else "")
        result = compute_memory(_activations(request, source, checkpoint, compute, batch, activations))
    except NoForward as error:
        result = compute_memory()
        notes = (f"without activations: {error}",)
    say("")
    reads = decoding(tree, plan, result, bandwidth)
    result = replace(result, notes=(*result.notes, *notes), decoding=reads)
    if as_object:
        print_json(as_json(result) | {"total_bytes": result.total_bytes, "fits": result.fits})
    else:
        from dtype_engine.reports.text_memory import memory_text

        answer(memory_text(result))
    return NO if result.fits is False else 0


def _activations(
    request: RunRequest, source: Source, checkpoint: Checkpoint | None, dtype: str, batch: int, how: str
) -> Callable[[int], ActivationMemory] | None:
    """Return a function that takes the number of tokens in the context, and returns the memory of activations in a pass over them.
    None if activations are left out. dtype: the dtype in which the model computes. how: the value of --activations. Raises
    NoForward.
    """
    if how == "none":
        return None
    if how == "measure":
        session = request.open_session(source)
        return lambda context: session.activation_memory(context, batch)
    if checkpoint is None:
        raise NoForward(
            f"{source.title} {source.no_headers}, and only checkpoints can be estimated; --activations measure runs it"
        )
    from dtype_engine.runtime.measure.activation_memory import estimator_of

    estimator = estimator_of(checkpoint, request.options, dtype)
    return lambda context: estimator.estimate(context, batch)
