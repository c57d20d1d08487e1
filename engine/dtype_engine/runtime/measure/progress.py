"""Reports how far a measurement has progressed, in input elements."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtype_engine.core.throttle import Throttle
from dtype_engine.runtime.inputs import Batch
from dtype_engine.runtime.measure.listener import OnProgress
from dtype_engine.runtime.passes.forward_pass import ModuleObserver

_IGNORES = ModuleObserver()


class MeasurementProgress:
    """Reports how many input elements a measurement has finished, counted over all passes. The finished fraction of a running pass
    is estimated from its module calls.

    calls: the number of module calls in a pass, by whether the pass observes all modules. This object updates it after each pass.
    modules: the number of the model's modules, which serves as an estimate before the first pass.
    """

    def __init__(self, on_progress: OnProgress, batches: Sequence[Batch], calls: dict[bool, int], modules: int) -> None:
        self._on_progress = on_progress
        self._sizes = [batch.elements for batch in batches]
        self._calls = calls
        self._modules = modules
        self._total = 0
        self._run = ""
        self._done = 0
        self._running: list[_PassProgress] = []
        self._throttle = Throttle()

    def expect(self, numbers: Sequence[int], with_reference: Collection[int], rest: float) -> None:
        """Set what is still to be run. numbers: the indexes of the remaining sequences, the next one first. with_reference: those
        over which the reference also has to run. rest: the estimated fraction of these sequences that the requested precision
        needs. While `rest` is below 1, the reported total may fall, but it does not rise.
        """
        self.close()
        left = [self._sizes[number] * (2 if number in with_reference else 1) for number in numbers]
        total = self._done + max(left[0], int(rest * sum(left)))
        self._total = max(self._done + left[0], min(total, self._total)) if rest < 1 and self._total else total

    def begin_pass(self, run: str, number: int, every_module: bool, observer: ModuleObserver | None) -> ModuleObserver:
        """Begin to count a pass of `run` ("reference" or "candidate") over a sequence. If the passes that are counted are of the
        other run, they end now. Returns an observer for the pass, which counts module calls and passes all outputs on to
        `observer`. every_module: whether the pass observes the outputs of all modules.
        """
        if run != self._run:
            self.close()
        self._run = run
        running = _PassProgress(self._report, self._sizes[number], every_module, observer or _IGNORES)
        self._running.append(running)
        self._report()  # a pass may end before its calls are reported
        return running

    def _report(self) -> None:
        if self._throttle.due():
            self._on_progress(self._run, self._done + sum(map(self._done_of, self._running)), self._total)

    def _done_of(self, running: _PassProgress) -> int:
        if running.of_steps is not None:
            return int(running.of_steps * running.size)
        expected = self._calls.get(running.every_module) or max(self._calls.values(), default=self._modules)
        return int(min(1.0, running.finished / max(1, expected)) * running.size)

    def close(self) -> None:
        """End all passes that are counted, and release their observers with the module outputs that these hold."""
        for running in self._running:
            self._done += running.size
            self._calls[running.every_module] = running.finished
        self._running.clear()


@dataclass
class _PassProgress(ModuleObserver):
    """Counts the finished module calls of one pass, and passes on what it observes."""

    report: Callable[[], None]
    size: int
    """The number of input elements of the pass."""
    every_module: bool
    observer: ModuleObserver
    finished: int = 0
    of_steps: float | None = None
    """The finished fraction of a pass that runs token by token, or None for other passes."""

    def __call__(self, module: str, call: int, output: torch.Tensor) -> Any:
        observed = self.observer(module, call, output)
        self._call_finished()
        return observed

    def begin_step(self, done: int, steps: int) -> None:
        self.of_steps = done / steps
        self.observer.begin_step(done, steps)
        self.report()

    def take_choice(self, module: str, call: int, chosen: torch.Tensor) -> None:
        self.observer.take_choice(module, call, chosen)

    def replay(self, module: str, observed: Any) -> None:
        self.observer.replay(module, observed)
        self._call_finished()

    def _call_finished(self) -> None:
        self.finished += 1
        self.report()


def part_of(on_progress: OnProgress, what: str, before: int, total: int) -> Callable[[int], None]:
    """Return a callback `on_done(done)` for one stage of a job, which calls `on_progress(what, before + done, total)`. what: the
    name of the stage. before: the amount of work in earlier stages. total: the amount of work in the whole job.
    """
    return lambda done: on_progress(what, before + done, total)
