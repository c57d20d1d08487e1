"""Formats the memory that serving a model takes as text for a terminal."""

from __future__ import annotations

from dtype_engine.core.dtypes import short_name
from dtype_engine.core.text import printable
from dtype_engine.core.units import bandwidth_text, human_bytes, plural, token_time
from dtype_engine.reports.text_table import table_lines
from dtype_engine.results.serving_memory import ServingMemory


def memory_text(memory: ServingMemory) -> str:
    """Return a table of the parts that take memory, then the context that fits in the budget, and notes about unknown sizes."""
    rows = [
        ("weights", human_bytes(memory.weights_bytes), ""),
        ("KV cache", human_bytes(memory.kv_bytes), cache_words(memory)),
    ]
    if (peak := memory.activations) is not None:
        how = "estimated" if peak.estimated else "measured"
        where = f"the peak is in {printable(peak.module)}" if peak.module else ""
        rows.append(("activations", human_bytes(peak.nbytes), f"{how}, {where}".removesuffix(", ")))
    rows.append(("together", human_bytes(memory.total_bytes), size_words(memory)))
    return "\n".join([*table_lines(rows, (1,)), *decoding_words(memory), *budget_words(memory), *memory.notes])


def decoding_words(memory: ServingMemory) -> list[str]:
    """Return a sentence with the bytes of weights that a token reads, and one with the least time for it if a bandwidth is known.
    [] if they are unknown and no bandwidth is given.
    """
    found = memory.decoding
    if found is None or (found.active_bytes is None and found.bandwidth is None):
        return []
    if found.active_bytes is None:
        return [f"no time per token: {found.what}"]
    lines = [f"a token reads {human_bytes(found.active_bytes)} of the weights: {found.what}"]
    if found.bandwidth is not None and found.milliseconds is not None and found.milliseconds_with_cache is not None:
        lines.append(f"decoding at {bandwidth_text(found.bandwidth)}: at least {token_time(found.milliseconds)}")
        if found.cache_bytes:
            with_cache = token_time(found.milliseconds_with_cache)
            lines[-1] += f"; with the KV cache of {memory.context:,} tokens, {with_cache}"
    return lines


def size_words(memory: ServingMemory) -> str:
    """Return the load for which the memory is computed, such as `4 sequences of 512 tokens`."""
    return f"{plural(memory.batch, 'sequence')} of {memory.context:,} tokens"


def cache_words(memory: ServingMemory) -> str:
    """Return the formats of the KV cache, and its growth, as in `fp8; 576 B for each further token`."""
    if not memory.kv_dtypes:
        return "none"
    grows = memory.kv_bytes_per_token
    more = f"{human_bytes(grows)} for each further token" if grows else "no more for further tokens"
    return f"{', '.join(map(short_name, memory.kv_dtypes))}; {more}"


def budget_words(memory: ServingMemory) -> list[str]:
    """Return a sentence with the number of tokens up to which the model fits in the budget, and one with the number of sequences
    for which it then has room. [] if there is no budget.
    """
    if memory.budget is None or memory.largest_context is None:
        return []
    budget, batch = human_bytes(memory.budget), f" (batch {memory.batch})" if memory.batch > 1 else ""
    if memory.largest_context == 0:
        return [f"does not fit {budget} at any context{batch}"]
    if memory.largest_context == memory.longest:
        words = f"fits {budget} at every context up to the model's {memory.longest:,} tokens{batch}"
    elif memory.kv_bytes_per_token == 0 and memory.activations is None and memory.fits:
        words = f"fits {budget} at any context{batch}"
    else:
        words = f"fits {budget} up to {memory.largest_context:,} tokens{batch}"
    if memory.most_sequences is None:
        return [words]
    room = plural(memory.most_sequences, "sequence") if memory.most_sequences else "no sequence"
    return [words, f"has room for {room} of {memory.context:,} tokens at a time"]
