"""Compares the module outputs of a candidate's pass with those of the reference run while the pass runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from dtype_engine.core.throttle import Throttle
from dtype_engine.runtime.measure.modules.module_sums import ModuleSums, compare_outputs
from dtype_engine.runtime.measure.modules.recorder import SeenOutput
from dtype_engine.runtime.measure.modules.routing import RoutingComparer
from dtype_engine.runtime.passes.forward_pass import ModuleObserver
from dtype_engine.runtime.passes.kept_positions import KeptPositions

_REPORT_EVERY = 10
"""Module metrics are reported once in this many progress reports, because computing them takes some milliseconds."""


@dataclass
class ModuleComparer(ModuleObserver):
    """Compares each module output of a candidate's pass as soon as it is returned, because the model may overwrite it later."""

    reference: Mapping[tuple[str, int], torch.Tensor]
    """The outputs that a `ModuleRecorder` recorded."""
    routing: RoutingComparer
    kept: KeptPositions | None = None
    """The positions to compare; if None, all."""
    on_sums: Callable[[Mapping[str, ModuleSums]], None] | None = None
    """Called from time to time with the sums that have changed."""
    sums: dict[str, ModuleSums] = field(default_factory=dict)
    """The squared errors and other sums by module name."""
    _unreported: set[str] = field(default_factory=set)
    _last: SeenOutput[tuple[torch.Tensor, ModuleSums]] | None = None
    _throttle: Throttle = field(default_factory=lambda: Throttle(first=False, every=_REPORT_EVERY))

    def __call__(self, module: str, call: int, output: torch.Tensor) -> ModuleSums | None:
        kept = self.reference.get((module, call))
        if kept is None:
            sums = None
        elif self.routing.is_shifted(module, output):
            sums = ModuleSums.not_comparable(kept, output)
        elif self._last is not None and self._last.result[0] is kept and self._last.is_same(output):
            sums = self._last.result[1]
        else:
            positions = None if self.kept is None else self.kept.of_module(module, call, kept)
            sums = compare_outputs(kept, output, positions)
            self._last = SeenOutput(output, (kept, sums))
        if sums is not None and kept is not None:
            self.routing.take_scores(module, call, kept, output)
            if rerouted := self.routing.rerouted_by(module):
                sums = replace(sums, rerouted=rerouted)
        self.replay(module, sums)
        return sums

    def take_choice(self, module: str, call: int, chosen: torch.Tensor) -> None:
        self.routing.take_choice(module, call, chosen)

    def replay(self, module: str, observed: ModuleSums | None) -> None:
        if observed is not None:
            if observed.rerouted:
                self.routing.mark(module, observed.rerouted)
            self.sums.setdefault(module, ModuleSums()).add(observed)
            self._unreported.add(module)
        if self.on_sums is not None and self._throttle.due():
            self.on_sums({name: self.sums[name] for name in self._unreported})
            self._unreported.clear()
