"""In which sequences modules are compared, and which modules a pass over any other sequence has to watch.

Comparing the outputs of all modules takes as long as a quarter of the pass that gives them, up to all of it in bfloat16 on a
processor with units for that. So they are compared in some sequences, over all elements: the first that is run, which is short,
and of the others each with which those compared have at most a sixth of what was run of them. The main output is compared in
every sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

_SHARE = 6
_OUTLINE = 10
"""A call with more than this share (1/10) of a pass's calls inside it is looked into."""


def compared_sequences(order: Sequence[int], elements: Sequence[int]) -> frozenset[int]:
    """The numbers of the sequences in which modules are compared, of those that are run in this order. elements: of each
    sequence's input.
    """
    chosen, compared, run = set(order[:1]), 0, 0
    for number in order[1:]:
        run += elements[number]
        if _SHARE * (compared + elements[number]) <= run:
            chosen.add(number)
            compared += elements[number]
    return frozenset(chosen)


def outline(finished: Sequence[str], spans: Sequence[int]) -> frozenset[str]:
    """The modules that a pass falls into: those it calls itself, and within large calls again. Their outputs are enough to run what
    follows them. finished: the modules of a pass's calls, as they ended; spans: how many had when each began.
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
