"""Compares the module outputs of a candidate's pass with those of the reference run while the pass runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch

from dtype_engine.core.throttle import Throttle
from dtype_engine.runtime.measure.modules.module_sums import ModuleSums, compare_outputs
from dtype_engine.runtime.measure.modules.routing import RoutingComparer
from dtype_engine.runtime.measure.modules.seen_output import SeenOutput
from dtype_engine.runtime.passes.forward_pass import ModuleObserver
from dtype_engine.runtime.passes.kept_positions import KeptPositions

_REPORT_EVERY = 10
"""Module metrics are reported once in this many progress reports, because computing them takes some milliseconds."""


class ModuleComparer(ModuleObserver):
    """Observes a candidate's pass, and compares each module output with that of the reference run. It does so as soon as the module
    returns, because the model may overwrite the output later. `sums` holds the squared errors and other sums by module name.

    reference: the outputs that a `ModuleRecorder` recorded. on_sums: called from time to time with the sums that have changed.
    kept: the positions to compare; if None, all. routing: finds routers that choose other experts than in the reference run.
    """

    def __init__(
        self,
        reference: Mapping[tuple[str, int], torch.Tensor],
        on_sums: Callable[[Mapping[str, ModuleSums]], None] | None = None,
        kept: KeptPositions | None = None,
        routing: RoutingComparer | None = None,
    ) -> None:
        self.sums: dict[str, ModuleSums] = {}
        self._reference = reference
        self._on_sums = on_sums
        self._kept = kept
        self._routing = RoutingComparer(None, {}) if routing is None else routing
        self._unreported: set[str] = set()
        self._last: SeenOutput[tuple[torch.Tensor, ModuleSums]] | None = None
        self._throttle = Throttle(first=False, every=_REPORT_EVERY)

    def __call__(self, module: str, call: int, output: torch.Tensor) -> ModuleSums | None:
        kept = self._reference.get((module, call))
        if kept is None:
            sums = None
        elif self._routing.is_shifted(module, output):
            sums = ModuleSums.not_comparable(kept, output)
        elif self._last is not None and self._last.result[0] is kept and self._last.is_same(output):
            sums = self._last.result[1]
        else:
            positions = None if self._kept is None else self._kept.of_module(module, call, kept)
            sums = compare_outputs(kept, output, positions)
            self._last = SeenOutput(output, (kept, sums))
        if sums is not None and kept is not None:
            self._routing.take_scores(module, call, kept, output)
            if rerouted := self._routing.rerouted_by(module):
                sums = dataclasses.replace(sums, rerouted=rerouted)
        self.replay(module, sums)
        return sums

    def take_choice(self, module: str, call: int, chosen: torch.Tensor) -> None:
        self._routing.take_choice(module, call, chosen)

    def replay(self, module: str, observed: ModuleSums | None) -> None:
        """Add the result of an earlier comparison for a module call that is skipped in this pass, because its earlier output is
        used again. observed: sums of squared errors from the earlier comparison; None if the module's output was not compared.
        """
        if observed is not None:
            if observed.rerouted:
                self._routing.mark(module, observed.rerouted)
            self.sums.setdefault(module, ModuleSums()).add(observed)
            self._unreported.add(module)
        if self._on_sums is not None and self._throttle.due():
            self._on_sums({name: self.sums[name] for name in self._unreported})
            self._unreported.clear()
