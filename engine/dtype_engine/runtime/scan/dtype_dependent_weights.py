"""Finds weights whose cast may change the dtype of other operations. The model's code reads the output dtype of the operations that
use these weights, and computes in this dtype elsewhere.

For example, a Llama computes the cosines and sines of positions (RoPE) in the dtype of the embeddings' output. The scan estimates
scores from the errors of single operations, which do not include this effect. These few weights are therefore measured in the
16-bit dtypes by separate passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

SIXTEEN_BITS = ("bfloat16", "float16")
MOST = 2
"""The maximum number of weights to measure by separate passes; each weight needs one pass for each dtype. If there are more such
weights, those are measured whose output dtype is read first.
"""


def weights_to_measure(
    read: Iterable[str], wanted: Mapping[str, Sequence[str]], sequence: int, sequences: int
) -> list[tuple[str, str]]:
    """Return the (weight, dtype) pairs to measure by separate passes in the sequence with the index `sequence`. sequences: how many
    sequences there are.

    If there are few sequences, each measures all pairs. If there are many, each measures at most one pair: for n pairs, sequences 0
    to n - 1 measure one each, sequence n measures none, and so on, so that the average is below one pass per sequence. read: the
    weights of operations whose output dtype was read, in the order of the pass. wanted: the dtypes in which each weight is scored.
    """
    few = [name for name in dict.fromkeys(read) if name in wanted][:MOST]
    keys = [(name, dtype) for name in few for dtype in wanted[name] if dtype in SIXTEEN_BITS]
    if not keys or sequences < 2 * (len(keys) + 1):
        return keys
    turn = sequence % (len(keys) + 1)
    return keys[turn : turn + 1]
