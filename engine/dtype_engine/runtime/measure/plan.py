"""Decides the order in which a measurement runs the sequences, and which modules' outputs it observes in each sequence.

Comparing the outputs of all modules takes a quarter of the time of a pass. If the pass runs in bfloat16 on a processor with
bfloat16 units, comparing takes up to as long as the pass itself. Modules are therefore compared in some sequences only. The main
output is compared in every sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from dtype_engine.runtime.inputs import Batch

_SHARE = 6
_OUTLINE = 10
"""If a call contains more than 1 / `_OUTLINE` of all calls, `outline` also lists the modules called directly inside it."""


@dataclass(frozen=True, slots=True)
class Step:
    """One sequence of a measurement, over which first the reference and then the candidate runs."""

    number: int
    """The index of the sequence among the inputs."""
    compares_modules: bool
    left: tuple[int, ...]
    """The indexes of the sequences that will run after this one."""


class MeasurementPlan:
    """Plans the order in which a measurement runs the sequences, and in which of them modules are compared."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self.order = running_order(batches)
        """The indexes of the sequences, in the order in which they run."""
        self._compared = compared_sequences(self.order, [batch.elements for batch in batches])
        self.outline: frozenset[str] | None = None
        """The modules whose calls a pass records if it does not compare modules. None until a pass has recorded all modules."""
        self.cached: frozenset[str] | None = None
        """The modules of `outline` whose outputs are also kept, so that later measurements can reuse them."""

    def steps(self, all_modules: Callable[[], bool]) -> Iterator[Step]:
        """Yield a step for every sequence. all_modules: returns whether to compare modules in all sequences. If it returns True at
        the end, the sequences in which modules were not compared are yielded again.
        """
        without = list[int]()
        for turn, number in enumerate(self.order):
            compares = self.compares(number) or all_modules()
            if not compares:
                without.append(number)
            yield Step(number, compares, self.order[turn + 1 :])
        if all_modules():
            for turn, number in enumerate(without):
                yield Step(number, True, tuple(without[turn + 1 :]))

    def compares(self, number: int) -> bool:
        """Return whether modules are compared in a sequence even if the caller of the measurement does not request it."""
        return number in self._compared

    def watched(self, step: Step) -> frozenset[str] | None:
        """Return the names of the modules whose outputs are observed in a step, or None for all modules."""
        return None if step.compares_modules else self.outline

    def add_calls(self, finished: Sequence[str], spans: Sequence[int], main: Collection[str]) -> None:
        """Choose the modules of `outline` from the calls of the first pass that observed all modules. finished, spans: as in
        `PassResult`. main: the modules that returned the main output. Their outputs are not kept for reuse, because they are the
        largest and no module runs after them.
        """
        if self.outline is None:
            self.outline = outline(finished, spans)
            self.cached = self.outline.difference(name for name in main if finished.count(name) == 1)


def running_order(batches: Sequence[Batch]) -> tuple[int, ...]:
    """Return the indexes of the batches in the order in which they run. The shortest batch is the first, so that a result is
    available soon. Consecutive parts of a text are alike, so the order of the others keeps neighbors far apart.
    """
    count = len(batches)
    numbers = range(count)
    shortest = min(numbers, key=lambda number: batches[number].elements, default=0)
    golden = round(0.618 * count)
    step = next((step for step in range(max(1, golden), count) if math.gcd(step, count) == 1), 1)
    return tuple(sorted((turn * step % count for turn in numbers), key=lambda number: number != shortest))


def compared_sequences(order: Sequence[int], elements: Sequence[int]) -> frozenset[int]:
    """Return the indexes of the sequences in which modules are compared: the first, which is short, and some of the later ones,
    which together have at most a sixth of the later input elements. order: the indexes of the sequences, as they run. elements: the
    number of input elements of each sequence.
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
    These are the modules that the model calls directly. If such a call contains more than a tenth of all calls, the modules called
    directly inside it are added, and so on. finished, spans: as in `PassResult`.
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
