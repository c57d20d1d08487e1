"""The module outputs of a candidate's pass, compared with the reference's as the pass goes by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from dtype_engine.core.throttle import Throttle
from dtype_engine.runtime.measure.modules.module_sums import ModuleSums, compare_outputs
from dtype_engine.runtime.measure.modules.same_output import SeenOutput
from dtype_engine.runtime.measure.progress import CallProgress
from dtype_engine.runtime.numerics.compare.element_sums import ElementSums
from dtype_engine.runtime.passes.forward_pass import ModuleObserver

_REPORT_EVERY = 10
"""Times the interval of progress: adding up the sums so far takes some milliseconds."""


@dataclass(slots=True)
class _Compared:
    """One output, and the sums of its comparison. names: whose it is, where it may be the main output: they wait for its sums."""

    seen: SeenOutput
    reference: torch.Tensor
    sums: ModuleSums
    names: list[str] = field(default_factory=list)


class ModuleComparer(ModuleObserver):
    """Observes a candidate's pass: compares each module output with the reference's at once, since a model may write to an output
    after the module returned it. `sums` has this pass's, by module; complete once `finish` was called.

    reference: the outputs of a `ModuleRecorder`; `main` is that of them which is the reference's main output. The main output is
    compared anyway, so the modules that return it get its sums. on_sums: is given the sums that have changed, now and then.
    """

    def __init__(
        self,
        reference: Mapping[tuple[str, int], torch.Tensor],
        main: torch.Tensor,
        progress: CallProgress,
        on_sums: Callable[[Mapping[str, ModuleSums]], None] | None = None,
    ) -> None:
        self.sums: dict[str, ModuleSums] = {}
        self._reference = reference
        self._main = main
        self._progress = progress
        self._on_sums = on_sums
        self._unreported: set[str] = set()
        self._throttle = Throttle(first=False, every=_REPORT_EVERY)
        self._last: _Compared | None = None

    def __call__(self, module: str, call: int, output: torch.Tensor) -> ModuleSums | None:
        kept = self._reference.get((module, call))
        sums = None if kept is None else self._compared(module, kept, output)
        self._progress_made()
        return sums

    def replay(self, module: str, observed: ModuleSums | None) -> None:
        """Add the sums that an earlier pass had of the same output."""
        if observed is not None:
            self._add(module, observed)
        self._progress_made()

    def restart(self) -> None:
        """Forget what was compared."""
        self.sums.clear()
        self._unreported.clear()
        self._last = None
        self._progress.restart()

    def finish(self, output: torch.Tensor, sums: ElementSums) -> None:
        """The pass is over, and these are the sums of its main output."""
        last = self._last
        if last is not None and last.names and last.seen.is_same(output):
            last.sums.sums.add(sums)
            self._add_waiting(last)
        self._settle_last()

    def _compared(self, module: str, reference: torch.Tensor, output: torch.Tensor) -> ModuleSums:
        last = self._last
        if last is None or last.reference is not reference or not last.seen.is_same(output):
            self._settle_last()
            may_be_main = reference is self._main
            sums = ModuleSums() if may_be_main else compare_outputs(reference, output)
            last = self._last = _Compared(SeenOutput(output), reference, sums)
        if last.reference is self._main:
            last.names.append(module)
        else:
            self._add(module, last.sums)
        return last.sums

    def _settle_last(self) -> None:
        """Compare what returned last, where that of the reference is the main output and this is not."""
        last, self._last = self._last, None
        if last is None or not last.names:
            return
        if last.seen.is_unchanged:
            last.sums.add(compare_outputs(last.reference, last.seen.output))
        else:
            last.sums.comparable = False  # something wrote to it
        self._add_waiting(last)

    def _add_waiting(self, compared: _Compared) -> None:
        for name in compared.names:
            self._add(name, compared.sums)
        compared.names.clear()

    def _add(self, module: str, sums: ModuleSums) -> None:
        self.sums.setdefault(module, ModuleSums()).add(sums)
        self._unreported.add(module)

    def _progress_made(self) -> None:
        self._progress.call_finished()
        if self._on_sums is not None and self._throttle.due():
            self._on_sums({name: self.sums[name] for name in self._unreported})
            self._unreported.clear()
