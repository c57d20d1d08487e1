"""Decides in which sequences modules are compared, and which modules' outputs are kept in passes over the other sequences.

Comparing the outputs of all modules takes a quarter of the time of a pass. If the pass runs in bfloat16 on a processor with
bfloat16 units, comparing takes up to as long as the pass itself. Modules are therefore compared in some sequences only. One of them
is the first sequence, which is short. The others have at most a sixth of the input elements that are run after the first sequence.
In these sequences, all elements of the outputs are compared. The main output is compared in every sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

_SHARE = 6
_OUTLINE = 10
"""If a module call contains more than 1 / `_OUTLINE` of all calls of the pass, `outline` also lists the modules called directly
inside it. Some of their calls can then be skipped even if others have changed.
"""


def compared_sequences(order: Sequence[int], elements: Sequence[int]) -> frozenset[int]:
    """Return the indexes of the sequences in which modules are compared. order: the indexes of all sequences, in the order in which
    they run. elements: the number of input elements of each sequence.
    """
    chosen, compared, run = set(order[:1]), 0, 0
    for number in order[1:]:
        run += elements[number]
        if _SHARE * (compared + elements[number]) <= run:
            chosen.add(number)
            compared += elements[number]
    return frozenset(chosen)


def outline(finished: Sequence[str], spans: Sequence[int]) -> frozenset[str]:
    """Return a small set of modules whose outputs are worth keeping, so that the next pass can skip calls that have not changed.

    The set has the modules that the model calls directly. If such a call contains more than a tenth of all calls, the set also has
    the modules called directly inside it, and so on.

    finished: the called module's name for each call of a pass, in the order in which calls ended. spans: for each of these calls,
    how many calls had finished when it began.
    """
    if len(spans) != len(finished):
        return frozenset(finished)
    names = set[str]()
    ranges = [(0, len(finished))]
    while ranges:
        first, end = ranges.pop()
        while end > first:
            last = end - 1
            names.add(finished[last])
            end = spans[last]
            if last - end > len(finished) // _OUTLINE:
                ranges.append((end, last))
    return frozenset(names)
