"""In which sequences modules are compared, and which modules a pass over any other sequence has to watch.

A module's output costs as much in a short pass as in a long one: of a bfloat16 pass over 128 tokens, on a processor with units for
it, all of them take up to half (Intel Xeon with AMX). So modules are compared in sequences with at least a quarter of all
positions but the first's: not in the first that is run, which is short and whose figures are waited for, but in the second, and in
each without which it would be less than a quarter of those run so far. How far figures may be from those over all sequences:
`module_totals`. The main output is compared in every sequence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

_SHARE = 4
_OUTLINE = 10
"""A call with more than this share (1/10) of a pass's calls inside it is looked into."""


def compared_sequences(order: Iterable[int], elements: Sequence[int]) -> frozenset[int]:
    """The numbers of the sequences in which modules are compared, of those that are run in this order, by their elements."""
    first, *others = [*order] or [0]
    chosen, compared, run = set[int](), 0, 0
    for number in others:
        run += elements[number]
        if _SHARE * compared < run:
            chosen.add(number)
            compared += elements[number]
    return frozenset(chosen) or frozenset({first})


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

    compared: their numbers. first: the one that is run first. modules: the names of all modules.
    """

    def __init__(self, compared: frozenset[int], first: int, modules: Collection[str]) -> None:
        self.compared = compared
        self.first = first
        self._uncalled = set(modules)
        self._of_first = frozenset[str]()
        self.outline: frozenset[str] | None = None
        """The modules that a pass falls into (see `outline`), once the first sequence was run."""
        self.kept: frozenset[str] | None = None
        """Those of them whose outputs are kept for the next pass: all but the main output, which nothing runs after."""
        self._elsewhere: dict[int, frozenset[str]] = {}

    def note(self, number: int, finished: Sequence[str], spans: Sequence[int], main: Collection[str] = ()) -> None:
        """A sequence was run with all modules watched; these are its calls, as `outline` has them. main: the modules that gave its
        main output.
        """
        if number == self.first:
            self._of_first, self.outline = frozenset(finished), outline(finished, spans)
            self.kept = self.outline.difference(name for name in main if finished.count(name) == 1)
        if number in self.compared:
            self._uncalled.difference_update(finished)

    def compared_in(self, number: int) -> frozenset[str] | None:
        """The modules that are compared in a sequence, None for all: elsewhere those that no compared sequence called."""
        if number in self.compared:
            return None
        return self._elsewhere.setdefault(number, frozenset(self._uncalled if number != self.first else ()))

    def watched_in(self, number: int) -> frozenset[str] | None:
        """The modules that are watched in a sequence, None for all."""
        compared = self.compared_in(number)
        return None if compared is None or self.outline is None else compared | self.outline

    def called_by_the_first_alone(self) -> bool:
        """All sequences were run: whether only the first called some modules, which are compared in it from now on."""
        alone = self._of_first & self._uncalled
        if self.compared_in(self.first) in (None, alone):
            return False
        self._elsewhere[self.first] = alone
        return True
