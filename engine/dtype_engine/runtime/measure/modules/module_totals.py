"""The figures of modules, from their sums over sequences, and how far they may be from those over every row of all sequences.

A figure's error has two parts, which are added as variances: that of a sample of rows (`row_comparison`), and that of the sequences
in which the module was not compared, or not yet (`sampling_error`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from dtype_engine.results.drift import ModuleDrift
from dtype_engine.runtime.measure.modules.row_comparison import ModuleSums
from dtype_engine.runtime.measure.sampling_error import relative_error
from dtype_engine.runtime.numerics.compare.metrics import sqnr_db

_DB = 10 / math.log(10)


@dataclass(slots=True)
class ModuleTotal:
    """One module over the sequences so far. means: ΣΔ² / Σr² of each it was compared in, and `energies` their Σr²; `of_compared`:
    how many of them are sequences in which all modules are.
    """

    sums: ModuleSums = field(default_factory=ModuleSums)
    energies: list[float] = field(default_factory=list)
    means: list[float] = field(default_factory=list)
    of_compared: int = 0

    def add(self, sums: ModuleSums, compared: bool) -> None:
        """Take in one more sequence. compared: all modules were compared in it."""
        self.sums.add(sums)
        self.energies.append(sums.energy)
        self.means.append(sums.noise / sums.energy if sums.energy else 0.0)
        self.of_compared += compared

    def with_sequence(self, sums: ModuleSums, compared: bool) -> ModuleTotal:
        """Another one, with one more sequence."""
        total = ModuleTotal(ModuleSums(), [*self.energies], [*self.means], self.of_compared)
        total.sums.add(self.sums)
        total.add(sums, compared)
        return total

    def drift(self, name: str, left: int, routed: bool) -> ModuleDrift:
        """Its figures; `left` and `routed` as for `module_drifts`."""
        sums = self.sums
        figure = sqnr_db(sums.energy, sums.noise) if sums.comparable else None
        return ModuleDrift(name, figure, sums.max_abs, sums.nonfinite, self._error_db(left, routed))

    def _error_db(self, left: int, routed: bool) -> float | None:
        sums = self.sums
        if routed and (sums.variance or left):
            return None
        if sums.nonfinite or not sums.noise or not math.isfinite(sums.noise):
            return 0.0
        total = left + self.of_compared
        between = relative_error(self.energies, self.means, total) if total > len(self.means) else 0.0
        return _DB * math.sqrt(sums.variance / sums.noise**2 + (between or 0.0) ** 2)


def module_drifts(totals: Mapping[str, ModuleTotal], left: int = 0, routed: bool = False) -> tuple[ModuleDrift, ...]:
    """The figures of each module; its SQNR and the standard error of that are in dB, None where there is nothing to compare.

    left: in how many of all sequences not all modules were compared. routed: the model sends tokens to experts. One that goes
    elsewhere drifts a hundred times as far as others, and is rare: a sample of rows says nothing of it, and has no error.
    """
    return tuple(total.drift(name, left, routed) for name, total in totals.items())
