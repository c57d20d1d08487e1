"""Module outputs of a candidate beside those of the reference, as the pass goes by.

An output here is the first floating tensor that a module's call returned, of any shape; calls of a module are counted from 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from dtype_engine.core.throttle import Throttle
from dtype_engine.results.drift import ModuleDrift
from dtype_engine.runtime.model.torch_private import version_of
from dtype_engine.runtime.numerics.metrics import sqnr_db

OnModules = Callable[[tuple[ModuleDrift, ...]], None]
KeptOutput = tuple[torch.Tensor, float]
"""A copy of a reference output, and its energy Σr²."""
_DISTRIBUTIONS = ("logits", "logits_per_image", "start_logits", "prediction_logits")


def is_distribution(name: str, output: torch.Tensor) -> bool:
    """Whether the output field `name` holds logits over classes or tokens in its last dimension."""
    return name in _DISTRIBUTIONS and output.ndim >= 2 and output.shape[-1] >= 2


@dataclass(slots=True)
class ModuleSums:
    """One module over all its calls so far: Σr² and ΣΔ², the largest |Δ|, and values that only the candidate has not finite."""

    energy: float = 0.0
    noise: float = 0.0
    max_abs: float = 0.0
    nonfinite: int = 0
    comparable: bool = True

    def add(self, other: ModuleSums) -> None:
        """Take in the sums of further calls."""
        self.energy += other.energy
        self.noise += other.noise
        self.max_abs = max(self.max_abs, other.max_abs)
        self.nonfinite += other.nonfinite
        self.comparable = self.comparable and other.comparable


def module_drifts(sums: Mapping[str, ModuleSums]) -> tuple[ModuleDrift, ...]:
    """The figures of each module; its SQNR is in dB, None where there is nothing to compare."""
    return tuple(
        ModuleDrift(name, sqnr_db(each.energy, each.noise) if each.comparable else None, each.max_abs, each.nonfinite)
        for name, each in sums.items()
    )


def compare_outputs(reference: torch.Tensor, energy: float, candidate: torch.Tensor) -> ModuleSums:
    """One output against the reference's, whose energy Σr² is known. Computed in the reference's dtype."""
    if candidate.shape != reference.shape:
        # Experts see other tokens when the routing changes: there is nothing to compare element by element.
        return ModuleSums(comparable=False)
    if candidate.dtype == reference.dtype and torch.equal(candidate, reference):
        return ModuleSums(energy)
    delta = candidate.detach().to(reference.dtype, copy=True).sub_(reference)
    noise = _energy(delta)
    nonfinite = 0
    if not math.isfinite(noise):
        nonfinite = int((torch.isfinite(reference) & ~torch.isfinite(candidate)).sum())
        both = torch.isfinite(delta)
        if not nonfinite and not bool(both.any()):
            return ModuleSums(comparable=False)  # nothing is finite on either side: that is no agreement
        noise = math.inf if nonfinite else _energy(delta[both])
        delta = delta[both]
        energy = _energy(reference[torch.isfinite(reference)])
    max_abs = math.inf if nonfinite else 0.0
    if delta.numel():
        max_abs = max(max_abs, -float(delta.amin()), float(delta.amax()))  # aminmax takes twice as long
    return ModuleSums(energy, noise, max_abs, nonfinite)


def _energy(tensor: torch.Tensor) -> float:
    """Σx², in the tensor's own dtype and, where that overflows, in float64."""
    flat = tensor.reshape(-1)
    energy = float(torch.dot(flat, flat)) if flat.numel() else 0.0
    return energy if math.isfinite(energy) else float(flat.double().square().sum())


class OutputRecorder:
    """Observes a reference pass: keeps a copy of every module output, up to `budget` bytes.

    `kept` has them by (module, call), `left_out` the modules with an output that did not fit. `on_progress(calls)`.
    """

    def __init__(self, budget: int, on_progress: Callable[[int], None] = lambda calls: None) -> None:
        self.kept: dict[tuple[str, int], KeptOutput] = {}
        self.left_out: set[str] = set()
        self.calls = 0
        self._budget = budget
        self._on_progress = on_progress
        self._throttle = Throttle(first=False)
        self._last: tuple[torch.Tensor, int, KeptOutput] | None = None

    def copy_of(self, output: torch.Tensor) -> torch.Tensor | None:
        """The copy kept of this very tensor, if it was the last module's: the logits mostly are, and the largest of all."""
        last = self._last
        return last[2][0] if last is not None and last[0] is output and last[1] == version_of(output) else None

    def replay(self, module: str, reading: object) -> None:
        """Never called: the reference reuses no earlier pass's outputs."""
        raise AssertionError("the reference reuses nothing")

    def __call__(self, module: str, call: int, output: torch.Tensor) -> None:
        self.calls += 1
        # A parent often returns its last child's very tensor: one copy serves both, unless it was written to since.
        if self._last is not None and self._last[0] is output and self._last[1] == version_of(output):
            self.kept[module, call] = self._last[2]
        elif output.nbytes <= self._budget:
            copy = output.detach().clone(memory_format=torch.contiguous_format)
            entry = (copy, _energy(copy))
            self.kept[module, call] = entry
            self._budget -= copy.nbytes
            self._last = (output, version_of(output), entry)
        else:
            self.left_out.add(module)
        if self._throttle.due():
            self._on_progress(self.calls)


class OutputComparer:
    """Observes a candidate pass: compares each module output with the reference's; `sums` has this pass's by module.

    before: the sums of earlier passes, which `on_modules` is given together with these. `on_progress(calls)`.
    """

    def __init__(
        self,
        reference: Mapping[tuple[str, int], KeptOutput],
        before: Mapping[str, ModuleSums],
        on_progress: Callable[[int], None],
        on_modules: OnModules,
    ) -> None:
        self.sums: dict[str, ModuleSums] = {}
        self._reference = reference
        self._before = before
        self._on_progress = on_progress
        self._on_modules = on_modules
        self._calls = 0
        self._unreported: set[str] = set()
        self._throttle = Throttle(first=False)
        self._last: tuple[torch.Tensor, int, torch.Tensor, ModuleSums] | None = None

    def __call__(self, module: str, call: int, output: torch.Tensor) -> ModuleSums | None:
        kept = self._reference.get((module, call))
        if kept is None:
            self._report()
            return None
        last = self._last
        # A parent often returns its last child's very tensor: it is compared once for both.
        again = last is not None and last[0] is output and last[1] == version_of(output) and last[2] is kept[0]
        sums = last[3] if again and last is not None else compare_outputs(kept[0], kept[1], output)
        self._last = (output, version_of(output), kept[0], sums)
        self.replay(module, sums)
        return sums

    def restart(self) -> None:
        """The pass is run again from its beginning: what was compared so far does not count."""
        self.sums.clear()
        self._unreported.clear()
        self._last = None

    def replay(self, module: str, reading: ModuleSums | None) -> None:
        """Add one call's sums to its module's."""
        if reading is not None:
            self.sums.setdefault(module, ModuleSums()).add(reading)
            self._unreported.add(module)
        self._report()

    def _report(self) -> None:
        self._calls += 1
        if self._throttle.due():
            self._on_progress(self._calls)
            news = {name: self._total(name) for name in self._unreported}
            self._unreported.clear()
            self._on_modules(module_drifts(news))

    def _total(self, module: str) -> ModuleSums:
        total = ModuleSums()
        if module in self._before:
            total.add(self._before[module])
        total.add(self.sums[module])
        return total
