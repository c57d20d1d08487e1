"""Decides the order in which a measurement runs the sequences, and which modules' outputs it observes in each sequence."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from dtype_engine.runtime.inputs import Batch
from dtype_engine.runtime.measure.modules.compared_sequences import compared_sequences, outline


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a measurement: a single sequence, over which first the reference and then the candidate runs."""

    number: int
    """The index of the sequence among the inputs."""
    compares_modules: bool
    """Whether modules are compared in this sequence. If False, only the main output is compared."""
    left: tuple[int, ...]
    """The indexes, among the inputs, of the sequences that will run after this one."""


class MeasurementPlan:
    """Plans the order in which a measurement runs the sequences, and in which of them modules are compared.

    order: the indexes of the sequences, in the order in which they run. outline: the names of the modules whose calls a pass
    records in a sequence where modules are not compared, such as the layers. It is None until a first pass has recorded those of
    all modules. cached: the modules of `outline` whose outputs are also kept, so that later measurements can reuse them.
    """

    def __init__(self, batches: Sequence[Batch]) -> None:
        self.order = running_order(batches)
        self._compared = compared_sequences(self.order, [batch.elements for batch in batches])
        self.outline: frozenset[str] | None = None
        self.cached: frozenset[str] | None = None

    def steps(self, all_modules: Callable[[], bool]) -> Iterator[Step]:
        """Yield a step for every sequence. all_modules: a function that returns whether to compare modules in all sequences. If it
        returns True at the end, the sequences in which modules were not compared are yielded again.
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
        """Return whether modules are always compared in the sequence with the index `number`. In other sequences, modules are
        compared only if the caller of the measurement requests it.
        """
        return number in self._compared

    def watched(self, step: Step) -> frozenset[str] | None:
        """Return the names of the modules whose outputs are observed in a step, or None for all modules."""
        return None if step.compares_modules else self.outline

    def add_calls(self, finished: Sequence[str], spans: Sequence[int], main: Collection[str]) -> None:
        """Choose the modules of `outline` from the calls of the first pass that observed all modules. main: the modules that
        returned the main output. Their outputs are not kept for reuse, because they are the largest and no module runs after them.
        finished: the name of the called module for each call, in the order in which calls ended. spans: how many calls had ended
        when each began.
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
