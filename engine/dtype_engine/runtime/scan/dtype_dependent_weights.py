"""Finds the weights of operations whose output dtype the model's code reads. In 16 bits, such a weight also affects other
operations than its own.

For example, a Llama computes the cosines and sines of positions (RoPE) in the dtype of the embeddings' output. Local errors do not
include this effect, so these few weights are measured in the 16-bit dtypes by separate passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

SIXTEEN_BITS = ("bfloat16", "float16")
MOST = 2
"""Maximum number of dtype-dependent weights to measure: those read first in a pass. Each needs one pass per dtype."""


def weights_to_measure(
    read: Iterable[str], wanted: Mapping[str, Sequence[str]], sequence: int, sequences: int
) -> list[tuple[str, str]]:
    """Return the (weight, dtype) pairs to measure by separate passes in a sequence.

    read: the weights of operations whose output dtype was read, in the order of the pass. If there are enough sequences, each
    sequence measures at most one pair, in turn. One sequence in each round measures none, so the average cost is below one pass per
    sequence.
    """
    few = [name for name in dict.fromkeys(read) if name in wanted][:MOST]
    keys = [(name, dtype) for name in few for dtype in wanted[name] if dtype in SIXTEEN_BITS]
    if not keys or sequences < 2 * (len(keys) + 1):
        return keys
    turn = sequence % (len(keys) + 1)
    return keys[turn : turn + 1]
