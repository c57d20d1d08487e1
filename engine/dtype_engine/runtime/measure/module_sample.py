"""In which sequences modules are compared, and which modules a pass over any other sequence has to watch.

A module's output costs as much in a short pass as in a long one: of a bfloat16 pass over 128 tokens, on a processor with units for
it, all of them take up to half (Intel Xeon with AMX). So modules are compared in sequences with at least a quarter of all
positions: in the first that is run, and in each without which it would be less than a quarter of those run so far. How far figures
may be from those over all sequences: `module_totals`. The main output is compared in every sequence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

_SHARE = 4
_OUTLINE = 10
"""A call with more than this share (1/10) of a pass's calls inside it is looked into."""


def compared_sequences(order: Iterable[int], elements: Sequence[int]) -> frozenset[int]:
    """The numbers of the sequences in which modules are compared, of those that are run in this order, by their elements."""
    chosen, compared, run = set[int](), 0, 0
    for number in order:
        run += elements[number]
        if not chosen or _SHARE * compared < run:
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


class ModuleSample:
    """The sequences in which modules are compared, and what is watched in the others: once settled, it stays.

    compared: their numbers. modules: the names of all modules.
    """

    def __init__(self, compared: frozenset[int], modules: Collection[str]) -> None:
        self.compared = compared
        self._uncalled = set(modules)
        self._outline: frozenset[str] | None = None
        self._elsewhere: dict[int, frozenset[str]] = {}

    def note(self, finished: Sequence[str], spans: Sequence[int]) -> None:
        """A sequence was run with all modules watched; these are its calls, as `outline` has them."""
        self._uncalled.difference_update(finished)
        if self._outline is None:
            self._outline = outline(finished, spans)

    def compared_in(self, number: int) -> frozenset[str] | None:
        """The modules that are compared in a sequence, None for all: elsewhere those that no compared sequence called."""
        if number in self.compared:
            return None
        return self._elsewhere.setdefault(number, frozenset(self._uncalled))

    def watched_in(self, number: int) -> frozenset[str] | None:
        """The modules that are watched in a sequence, None for all."""
        compared = self.compared_in(number)
        return None if compared is None else compared | (self._outline or frozenset())
