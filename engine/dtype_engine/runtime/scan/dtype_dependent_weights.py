"""Finds the weights of operations whose output dtype the model's code reads. In 16 bits, such a weight also affects other
operations than its own.

For example, a Llama computes the cosines and sines of positions (RoPE) in the dtype of the embeddings' output. Local errors do not
include this effect, so these few weights are measured in the 16-bit dtypes by separate passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

SIXTEEN_BITS = ("bfloat16", "float16")
MOST = 2
"""Maximum number of weights to measure by separate passes: those whose output dtype is read first. Each needs a pass per dtype."""


def weights_to_measure(
    read: Iterable[str], wanted: Mapping[str, Sequence[str]], sequence: int, sequences: int
) -> list[tuple[str, str]]:
    """Return the (weight, dtype) pairs to measure by separate passes in the sequence number `sequence`.

    read: the weights of operations whose output dtype was read, in the order of the pass. If there are enough sequences, they take
    turns: each measures one pair, and one sequence in every round measures none, so that the average is below one pass per
    sequence. wanted: the dtypes in which each weight is scored.
    """
    few = [name for name in dict.fromkeys(read) if name in wanted][:MOST]
    keys = [(name, dtype) for name in few for dtype in wanted[name] if dtype in SIXTEEN_BITS]
    if not keys or sequences < 2 * (len(keys) + 1):
        return keys
    turn = sequence % (len(keys) + 1)
    return keys[turn : turn + 1]
