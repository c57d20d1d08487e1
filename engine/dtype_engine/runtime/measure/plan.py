"""In which order a measurement runs the sequences, and what it watches in each."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from dtype_engine.runtime.inputs import Batch
from dtype_engine.runtime.measure.modules.compared_sequences import compared_sequences, outline


@dataclass(frozen=True, slots=True)
class Step:
    """One sequence of a measurement."""

    number: int
    """Its place among the inputs."""
    compares_modules: bool
    """Whether modules are compared in it, or the main output alone."""
    left: tuple[int, ...]
    """The numbers of the sequences that follow it, as far as is known."""


class MeasurementPlan:
    """The steps of a measurement over these inputs.

    order: the numbers of the sequences as they are run. outline: the modules that are watched where modules are not compared, None
    (all) before a pass has shown which; cached: those of them whose outputs are kept for the next measurement.
    """

    def __init__(self, batches: Sequence[Batch]) -> None:
        self.order = running_order(batches)
        self._compared = compared_sequences(self.order, [batch.elements for batch in batches])
        self.outline: frozenset[str] | None = None
        self.cached: frozenset[str] | None = None

    def steps(self, all_modules: Callable[[], bool]) -> Iterator[Step]:
        """Every sequence once; and where `all_modules()` says so at last, those in which modules were not compared once more."""
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
        """Whether modules are compared in a sequence, whatever is asked for."""
        return number in self._compared

    def watched(self, step: Step) -> frozenset[str] | None:
        """The modules that are watched in a step; None for all."""
        return None if step.compares_modules else self.outline

    def add_calls(self, finished: Sequence[str], spans: Sequence[int], main: Collection[str]) -> None:
        """Take in the calls of the first pass in which all modules were watched, as `outline` has them. main: the modules that
        returned its main output. That is not kept for the next measurement: nothing runs after it, and it is the largest.
        """
        if self.outline is None:
            self.outline = outline(finished, spans)
            self.cached = self.outline.difference(name for name in main if finished.count(name) == 1)


def running_order(batches: Sequence[Batch]) -> tuple[int, ...]:
    """The numbers of the batches in the order in which they are run: the shortest, so that there is a figure soon, then the others
    spread over the whole, since the parts of one text that follow each other are alike.
    """
    count = len(batches)
    numbers = range(count)
    shortest = min(numbers, key=lambda number: batches[number].elements, default=0)
    golden = round(0.618 * count)
    step = next((step for step in range(max(1, golden), count) if math.gcd(step, count) == 1), 1)
    return tuple(sorted((turn * step % count for turn in numbers), key=lambda number: number != shortest))
