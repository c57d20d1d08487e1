"""Reports the progress of a measurement."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from dtype_engine.core.throttle import Throttle
from dtype_engine.runtime.inputs import Batch
from dtype_engine.runtime.measure.listener import OnProgress
from dtype_engine.runtime.passes.forward_pass import ModuleObserver

_IGNORES = ModuleObserver()


class MeasurementProgress(ModuleObserver):
    """Observes every pass of a measurement and reports how many input elements are done, counted over all passes.

    The finished fraction of the current pass is estimated from its module calls. All outputs are passed on to the observer given to
    `begin_pass`.

    calls: the number of module calls in a pass, if known, keyed by whether the pass observes all modules (True) or only some
    (False); it is updated after each pass. modules: the number of the model's modules, used as an estimate before the first pass.
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
        self._observer: ModuleObserver = _IGNORES
        self._throttle = Throttle()

    def expect(self, numbers: Sequence[int], with_reference: Collection[int], rest: float) -> None:
        """Set the sequences that are still to be run, beginning with the next one.

        numbers: their indexes among the inputs. with_reference: the indexes of those over which the reference also has to run.
        rest: the estimated fraction of these sequences that is needed for results of the requested precision; 1 if all are needed.
        While `rest` is below 1, the reported total may fall, but it does not rise.
        """
        self._end_pass()
        left = [self._sizes[number] * (2 if number in with_reference else 1) for number in numbers]
        total = self._done + max(left[0], int(rest * sum(left)))
        self._total = max(self._done + left[0], min(total, self._total)) if rest < 1 and self._total else total

    def begin_pass(self, run: str, number: int, every_module: bool, observer: ModuleObserver | None) -> None:
        """Begin to count the pass of `run` ("reference" or "candidate") over the sequence `number`. This ends the previous pass.
        every_module: whether the pass observes the outputs of all modules.
        """
        self._end_pass()
        self._observer = observer or _IGNORES
        self._run, self._number, self._all = run, number, every_module
        if self._throttle.due():  # a pass may end before its calls are reported
            self._on_progress(run, self._done, self._total)

    def __call__(self, module: str, call: int, output: torch.Tensor) -> Any:
        observed = self._observer(module, call, output)
        self._call_finished()
        return observed

    def take_choice(self, module: str, call: int, chosen: torch.Tensor) -> None:
        """Pass the experts that a router chose on to this pass's observer."""
        self._observer.take_choice(module, call, chosen)

    def replay(self, module: str, observed: Any) -> None:
        """Count a skipped module call as finished, and pass its result from an earlier pass on to the observer."""
        self._observer.replay(module, observed)
        self._call_finished()

    def _call_finished(self) -> None:
        self._finished += 1
        if self._throttle.due():
            expected = self._calls.get(self._all) or max(self._calls.values(), default=self._modules)
            share = min(1.0, self._finished / max(1, expected))
            self._on_progress(self._run, self._done + int(share * self._sizes[self._number]), self._total)

    def _end_pass(self) -> None:
        if self._run:
            self._done += self._sizes[self._number]
            self._calls[self._all] = self._finished
        self._run, self._finished, self._observer = "", 0, _IGNORES
