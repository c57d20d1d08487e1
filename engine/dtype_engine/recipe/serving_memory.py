"""Computes the memory that serving a model takes: its weights, its KV cache and its activations. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from dtype_engine.core import dtypes
from dtype_engine.core.bandwidth import milliseconds
from dtype_engine.core.kv_cache import KVCache, KVCacheTensor
from dtype_engine.core.kv_formats import KV_FORMATS
from dtype_engine.core.number_ranges import MOST_TOKENS
from dtype_engine.core.tree import Totals, Tree
from dtype_engine.core.units import plural
from dtype_engine.recipe.plan import Plan

if TYPE_CHECKING:
    from dtype_engine.results.serving_memory import ActivationMemory, Decoding, ServingMemory

DEFAULT_CONTEXT = 8192


def serving_dtype(model: Totals, cache: KVCache) -> str:
    """Return the dtype in which a served model computes: the dtype of most weights if torch computes in it, otherwise the dtype
    that the model's configuration names, otherwise bfloat16. model: the totals of the whole model under the recipe.
    """
    most = next(iter(model.mix()), ("", 0.0))[0]
    return most if most in dtypes.COMPUTE_DTYPES else cache.dtype or "bfloat16"


def default_context(tree: Tree) -> int:
    """Return the number of tokens per sequence for which memory is computed if the user gives none."""
    return min(DEFAULT_CONTEXT, tree.kv_cache.longest or DEFAULT_CONTEXT)


def cache_bytes(tree: Tree, formats: Mapping[str, str], dtype: str, context: int, batch: int) -> dict[str, int]:
    """Return the bytes of the KV cache for `batch` sequences of `context` tokens, keyed by format, the largest first.

    formats: the formats that rules give to cache tensors, by name. dtype: the dtype in which the model computes, for `written_in`.
    """
    found: dict[str, int] = {}
    for tensor in tree.kv_cache.tensors:
        form = formats.get(tensor.name, written_in(tensor, dtype))
        found[form] = found.get(form, 0) + cache_tensor_bytes(tensor, form, context, batch)
    return dict(sorted(found.items(), key=lambda entry: -entry[1]))


def written_in(tensor: KVCacheTensor, dtype: str) -> str:
    """Return the dtype of a cache tensor without a rule, as transformers keeps it in a model that computes in `dtype`: for most
    states of recurrences float32, for all else `dtype`.
    """
    return tensor.state_dtype or dtype


def cache_tensor_bytes(tensor: KVCacheTensor, form: str, context: int, batch: int) -> int:
    """Return the bytes of one tensor of the KV cache in a format of `KV_FORMATS` or in a dtype, scales included."""
    if tensor.castable and form in KV_FORMATS:
        return KV_FORMATS[form].nbytes(tensor.shape(context, batch), keys=tensor.part in ("k", "latent"))
    return tensor.nbytes(form, context, batch)


def _wide_states(cache: KVCache, formats: Mapping[str, str], dtype: str) -> tuple[str, ...]:
    """Return a note if states are counted in a wider dtype than that in which the model computes (`dtype`), because no rule gives
    them a format: runtimes may have another default than transformers.
    """
    computed = dtypes.BY_NAME[dtype].bits
    wide = [
        tensor
        for tensor in cache.states
        if tensor.name not in formats and dtypes.BY_NAME[written_in(tensor, dtype)].bits > computed
    ]
    if not wide:
        return ()
    kept = dtypes.short_name(written_in(wide[0], dtype))
    return (
        f"{plural(len(wide), 'recurrent state')} counted in {kept}, as transformers keeps them; vLLM and SGLang may keep them in "
        f"another dtype: a rule such as *.{wide[0].part}={dtypes.short_name(dtype)} counts that",
    )


def cache_change(tree: Tree, plan: Plan, context: int) -> tuple[int, int]:
    """Return (bytes of the KV cache of one sequence of `context` tokens without rules, bytes of it under the plan)."""
    before, after = (
        sum(cache_bytes(tree, formats, serving_dtype(totals[""], tree.kv_cache), context, 1).values())
        for formats, totals in (({}, tree.totals()), (plan.caches, tree.totals(plan.dtypes)))
    )
    return before, after


def largest_context(
    fixed: Callable[[int], int], activations: Callable[[int], int] | None, budget: int, longest: int
) -> int:
    """Return the largest number of tokens, at most `longest`, with which a model fits in a budget of bytes, or 0 if no number fits.
    fixed: returns the bytes of weights and KV cache for a number of tokens. activations: returns the bytes of activations. A call
    of `activations` takes seconds, so it is called for at most eight numbers, and the result is one of these: a few percent more
    tokens may fit, too.
    """
    high = _largest(fixed, budget, longest)
    if activations is None or high == 0:
        return high
    known = {1: activations(1), high: activations(high)}
    if fixed(high) + known[high] <= budget:
        return high
    if fixed(1) + known[1] > budget:
        return 0
    low = 1
    known[high // 2 or 1] = activations(high // 2 or 1)
    for _ in range(5):
        found = _largest(lambda context: fixed(context) + interpolated(known, context), budget, high - 1)
        if found <= low:
            break
        known[found] = activations(found)
        low, high = (found, high) if fixed(found) + known[found] <= budget else (low, found)
    return low


def _largest(total: Callable[[int], float], budget: int, high: int) -> int:
    """Return the largest number up to `high` whose total fits in the budget, or 0. total: a function that never decreases."""
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if total(middle) <= budget else (low, middle - 1)
    return low


def interpolated(known: Mapping[int, int], context: int) -> float:
    """Return the bytes of activations at `context`, on the parabola through the three nearest points of `known` (bytes by number of
    tokens). Activations grow with the context or, if attention needs its whole matrix, with the square of the context.
    """
    near = sorted(known, key=lambda point: abs(point - context))[:3]
    return sum(
        known[point] * math.prod((context - other) / (point - other) for other in near if other != point)
        for point in near
    )


class Load(msgspec.Struct, frozen=True):
    """The sequences that a served model holds at the same time."""

    context: int
    """The number of tokens of each sequence."""
    batch: int = 1
    """The number of sequences."""
    kv: str | None = None
    """The format of KV caches to which no rule gives a format, but not of recurrent states, or None for the dtype in which the
    model computes.
    """


def serving_memory(
    model: str,
    tree: Tree,
    plan: Plan,
    load: Load,
    budget: int | None = None,
    activations: Callable[[int], ActivationMemory] | None = None,
    totals: Totals | None = None,
) -> ServingMemory:
    """Return the memory that a model takes when it is served under a plan.

    model: its name. budget: the available memory in bytes, or None. activations: returns the memory of a pass over a number of
    tokens; None: activations are left out. totals: of the whole model under the plan, if the caller has them. Raises what
    `activations` raises.
    """
    context, batch = load.context, load.batch
    cache, longest = tree.kv_cache, tree.kv_cache.longest
    dtype = serving_dtype(tree.totals(plan.dtypes)[""] if totals is None else totals, cache)
    formats = {**({} if load.kv is None else {tensor.name: load.kv for tensor in cache.of_tokens}), **plan.caches}

    def of_cache(tokens: int, sequences: int = batch) -> int:
        return sum(cache_bytes(tree, formats, dtype, tokens, sequences).values())

    def fixed(tokens: int) -> int:
        return plan.planned_bytes + of_cache(tokens)

    found = activations(context) if activations is not None else None
    most: int | None = None
    if budget is not None:
        of_pass = None if activations is None else lambda tokens: activations(tokens).nbytes
        most = largest_context(fixed, of_pass, budget, longest or MOST_TOKENS)
    free = None if budget is None else budget - plan.planned_bytes
    of_sequence = of_cache(context, 1) + (-(-found.nbytes // batch) if found is not None else 0)
    notes = cache.notes if cache.none_because is None else (f"without a KV cache: {cache.none_because}",)
    notes += (*_wide_states(cache, plan.caches, dtype), *tree.token_reads.notes)
    if longest is not None and context > longest:
        notes += (f"the model was made for at most {longest:,} tokens",)
    from dtype_engine.results.serving_memory import ServingMemory  # the first paint does not need it

    return ServingMemory(
        model=model,
        context=context,
        batch=batch,
        weights_bytes=plan.planned_bytes,
        kv_bytes=of_cache(context),
        kv_bytes_per_token=of_cache(context + 1, 1) - of_cache(context, 1),
        kv_dtypes=tuple(cache_bytes(tree, formats, dtype, context, batch)),
        activations=found,
        notes=notes,
        budget=budget,
        largest_context=most,
        most_sequences=max(0, free // of_sequence) if free is not None and of_sequence else None,
        longest=longest,
    )


def decoding(tree: Tree, plan: Plan, memory: ServingMemory, bandwidth: float | None = None) -> Decoding:
    """Return what a model reads for a token under a plan. For a model of many tensors, this takes as long as a plan.

    memory: the memory of the model under the plan. bandwidth: that of the memory in bytes per second, if it is known.
    """
    from dtype_engine.results.serving_memory import Decoding  # the first paint does not need it

    reads, active, cache = tree.token_reads, tree.active_bytes(plan.dtypes), memory.kv_bytes // memory.batch
    if active is None:
        return Decoding(None, reads.none_because or "", cache, bandwidth)
    if bandwidth is None:
        return Decoding(active, reads.words, cache)
    times = milliseconds(active, bandwidth), milliseconds(active + cache, bandwidth)
    return Decoding(active, reads.words, cache, bandwidth, *times)
