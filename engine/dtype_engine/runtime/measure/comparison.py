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
from dtype_engine.runtime.measure.module_rows import KeptRows, ModuleSums, Pending, compare_rows, keep_rows
from dtype_engine.runtime.model.torch_private import version_of
from dtype_engine.runtime.numerics.metrics import sqnr_db
from dtype_engine.runtime.numerics.sequence_comparison import ElementSums

OnModules = Callable[[tuple[ModuleDrift, ...]], None]
_MOST_PENDING = {"cpu": 1 << 21}
"""Elements of the candidate's outputs that wait to be compared, at most, by the kind of device; elsewhere `_MOST_ELSEWHERE`, since
whoever compares there waits for the device."""
_MOST_ELSEWHERE = 1 << 24
_DISTRIBUTIONS = ("logits", "logits_per_image", "start_logits", "prediction_logits")


def is_distribution(name: str, output: torch.Tensor) -> bool:
    """Whether the output field `name` holds logits over classes or tokens in its last dimension."""
    return name in _DISTRIBUTIONS and output.ndim >= 2 and output.shape[-1] >= 2


def module_drifts(sums: Mapping[str, ModuleSums]) -> tuple[ModuleDrift, ...]:
    """The figures of each module; its SQNR and the standard error of that are in dB, None where there is nothing to compare."""
    return tuple(
        ModuleDrift(
            name,
            sqnr_db(each.energy, each.noise) if each.comparable else None,
            each.max_abs,
            each.nonfinite,
            10 / math.log(10) * math.sqrt(each.variance) / each.noise if each.variance and not each.nonfinite else 0.0,
        )
        for name, each in sums.items()
    )


def compare_output(kept: KeptRows, candidate: torch.Tensor) -> ModuleSums:
    """One output against what is kept of the reference's."""
    if candidate.shape != kept.shape:
        # Experts see other tokens when the routing changes: there is nothing to compare element by element.
        return ModuleSums(comparable=False)
    sums = ModuleSums()
    compare_rows([Pending(kept, kept.of(candidate), sums)])
    return sums


@dataclass(slots=True)
class _Last:
    """The output of the module that returned last, by which its parent's is known again: it often is the very same, or a view of
    all of it. It is held here, so that its memory is no other tensor's.
    """

    output: torch.Tensor
    version: int

    @classmethod
    def of(cls, output: torch.Tensor) -> _Last:
        return cls(output, version_of(output))

    def is_same(self, output: torch.Tensor) -> bool:
        """Whether this holds the same values at the same places, and nothing has written to it since."""
        if self.output is output:
            return self.version == version_of(output)
        return (
            self.output.data_ptr() == output.data_ptr()
            and self.output.shape == output.shape
            and self.output.stride() == output.stride()
            and self.output.dtype == output.dtype
            and self.version == version_of(output) == version_of(self.output)
        )


class OutputRecorder:
    """Observes a reference pass: keeps rows of every module output, or all of them `in_full`, up to `budget` bytes.

    `kept` has them by (module, call), `left_out` the modules with an output that did not fit. `on_progress(calls)`.
    """

    def __init__(
        self, budget: int, on_progress: Callable[[int], None] = lambda calls: None, in_full: bool = False
    ) -> None:
        self.kept: dict[tuple[str, int], KeptRows] = {}
        self.left_out: set[str] = set()
        self.calls = 0
        self._budget = budget
        self._on_progress = on_progress
        self._in_full = in_full
        self._throttle = Throttle(first=False)
        self._last: tuple[_Last, KeptRows | None] | None = None

    def copy_of(self, output: torch.Tensor) -> torch.Tensor | None:
        """The copy kept of this very tensor, if all of it was kept as the last module's: the logits mostly are, and the largest."""
        if self._last is None or not self._last[0].is_same(output):
            return None
        kept = self._last[1]
        return kept.rows.view(kept.shape) if kept is not None and kept.index is None else None

    def replay(self, module: str, reading: object) -> None:
        """Never called: the reference reuses no earlier pass's outputs."""
        raise AssertionError("the reference reuses nothing")

    def __call__(self, module: str, call: int, output: torch.Tensor) -> None:
        self.calls += 1
        if self._last is None or not self._last[0].is_same(output):
            self._last = _Last.of(output), self._keep(output)
        kept = self._last[1]
        if kept is not None:
            self.kept[module, call] = kept
        else:
            self.left_out.add(module)
        if self._throttle.due():
            self._on_progress(self.calls)

    def _keep(self, output: torch.Tensor) -> KeptRows | None:
        if self._in_full and output.nbytes > self._budget:
            return None
        kept = keep_rows(output, self._in_full)
        if kept.rows.nbytes > self._budget:
            return None
        self._budget -= kept.rows.nbytes
        return kept


class OutputComparer:
    """Observes a candidate pass: compares each module output with the reference's; `sums` has this pass's by module.

    What is small is compared with others, many at once; `finish` once the pass is over.

    before: the sums of earlier passes, which `on_modules` is given together with these. `on_progress(calls)`.
    """

    def __init__(
        self,
        reference: Mapping[tuple[str, int], KeptRows],
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
        self._pending: list[Pending] = []
        self._pending_elements = 0
        self._found: list[tuple[str, ModuleSums]] = []
        """Of each call: sums that may be pending."""
        self._unreported: set[str] = set()
        self._throttle = Throttle(first=False)
        self._last: tuple[_Last, KeptRows, ModuleSums] | None = None

    def __call__(self, module: str, call: int, output: torch.Tensor) -> ModuleSums | None:
        kept = self._reference.get((module, call))
        if kept is None:
            self._report()
            return None
        if self._last is None or self._last[1] is not kept or not self._last[0].is_same(output):
            self._last = _Last.of(output), kept, self._compare(kept, output)
        sums = self._last[2]
        self.replay(module, sums)
        return sums

    def _compare(self, kept: KeptRows, output: torch.Tensor) -> ModuleSums:
        """The sums of one output, which may be pending: a copy then, since something may write to it."""
        most = _MOST_PENDING.get(output.device.type, _MOST_ELSEWHERE)
        if kept.rows.numel() > most // 8 or output.shape != kept.shape:
            return compare_output(kept, output)
        if self._pending_elements > most:
            self._compare_pending()
        rows = kept.of(output)
        self._pending_elements += rows.numel()
        self._pending.append(Pending(kept, rows if kept.index is not None else rows.clone(), ModuleSums()))
        return self._pending[-1].sums

    def restart(self) -> None:
        """The pass is run again from its beginning: what was compared so far does not count."""
        for waiting in (self.sums, self._pending, self._found, self._unreported):
            waiting.clear()
        self._pending_elements = 0
        self._last = None

    def replay(self, module: str, reading: ModuleSums | None) -> None:
        """Add one call's sums to its module's."""
        if reading is not None:
            self._found.append((module, reading))
        self._report()

    def finish(self, output: torch.Tensor, exact: ElementSums) -> None:
        """The pass is over: compare what is pending. Modules that gave the main output itself have its sums, over all of it."""
        if self._last is not None and self._last[0].is_same(output):
            sums = self._last[2]
            self._pending = [each for each in self._pending if each.sums is not sums]
            bad = exact.nonfinite_reference and not exact.energy
            sums.energy, sums.noise, sums.max_abs = exact.energy, exact.noise, exact.max_abs
            sums.nonfinite, sums.comparable, sums.variance = exact.nonfinite, not bad, 0.0
        self._last = None
        self._compare_pending()

    def _compare_pending(self) -> None:
        """All but the output of the module that returned last: it may be the main output."""
        last = self._last[2] if self._last is not None else None
        compare_rows(each for each in self._pending if each.sums is not last)
        for module, sums in self._found:
            if sums is not last:
                self.sums.setdefault(module, ModuleSums()).add(sums)
                self._unreported.add(module)
        self._pending = [each for each in self._pending if each.sums is last]
        self._found = [(module, sums) for module, sums in self._found if sums is last]
        self._pending_elements = 0

    def _report(self) -> None:
        self._calls += 1
        if self._throttle.due():
            self._on_progress(self._calls)
            self._compare_pending()
            news = {name: self._total(name) for name in self._unreported}
            self._unreported.clear()
            self._on_modules(module_drifts(news))

    def _total(self, module: str) -> ModuleSums:
        total = ModuleSums()
        if module in self._before:
            total.add(self._before[module])
        total.add(self.sums[module])
        return total
