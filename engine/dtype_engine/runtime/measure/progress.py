"""How much of a measurement is done."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from dtype_engine.core.throttle import Throttle
from dtype_engine.runtime.inputs import Batch
from dtype_engine.runtime.measure.listener import OnProgress
from dtype_engine.runtime.passes.forward_pass import ModuleObserver


class CallProgress:
    """What counts the module calls of one pass: this one counts nothing."""

    def call_finished(self) -> None:
        """One more call has returned."""

    def restart(self) -> None:
        """The pass begins again."""


class MeasurementProgress(CallProgress):
    """Tells how much of all passes is done, in elements of their inputs: of the pass under way by its module calls.

    calls: of a pass in which every module is watched (True) or some are (False), as far as they were counted; it is kept current.
    modules: how many the model has, the best guess before any pass.
    """

    def __init__(self, on_progress: OnProgress, batches: Sequence[Batch], calls: dict[bool, int], modules: int) -> None:
        self._on_progress = on_progress
        self._sizes = [batch.elements for batch in batches]
        self._calls = calls
        self._modules = modules
        self._total = 0
        self._run, self._number, self._all = "", 0, True
        self._done = 0
        self._finished = 0
        self._throttle = Throttle()

    def expect(self, numbers: Sequence[int], with_reference: Collection[int], rest: float) -> None:
        """The sequences that are still to be run, the next one first, and those of them over which the reference runs too. rest:
        the share of these that will be, by a guess: one that is larger than before counts only where there is more to do than was
        said.
        """
        self._end_pass()
        left = [self._sizes[number] * (2 if number in with_reference else 1) for number in numbers]
        total = self._done + max(left[0], int(rest * sum(left)))
        self._total = max(self._done + left[0], min(total, self._total)) if rest < 1 and self._total else total

    def begin_pass(self, run: str, number: int, every_module: bool) -> None:
        """A pass over a sequence begins; the one before has ended."""
        self._end_pass()
        self._run, self._number, self._all = run, number, every_module
        if self._throttle.due():  # a pass may end before its calls are reported
            self._on_progress(run, self._done, self._total)

    def call_finished(self) -> None:
        """A module that is watched has returned."""
        self._finished += 1
        if self._throttle.due():
            expected = self._calls.get(self._all) or max(self._calls.values(), default=self._modules)
            share = min(1.0, self._finished / max(1, expected))
            self._on_progress(self._run, self._done + int(share * self._sizes[self._number]), self._total)

    def restart(self) -> None:
        """The pass begins again."""
        self._finished = 0

    def _end_pass(self) -> None:
        if self._run:
            self._done += self._sizes[self._number]
            self._calls[self._all] = self._finished
        self._run, self._finished = "", 0


class CallCounter(ModuleObserver):
    """Observes a pass only to tell how far it is."""

    def __init__(self, progress: CallProgress) -> None:
        self._progress = progress

    def __call__(self, module: str, call: int, output: torch.Tensor) -> None:
        self._progress.call_finished()

    def replay(self, module: str, observed: object) -> None:
        """A call that was reused counts as one that ran."""
        self._progress.call_finished()

    def restart(self) -> None:
        """The pass begins again."""
        self._progress.restart()
