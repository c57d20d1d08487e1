"""Module outputs of a candidate beside those of the reference, as the pass goes by.

An output here is the first floating tensor that a module's call returned, of any shape; calls of a module are counted from 0.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dtype_engine.core.throttle import Throttle
from dtype_engine.results.drift import ModuleDrift
from dtype_engine.runtime.measure.modules.module_rows import MOST_ROWS, KeptRows, RowKeeper
from dtype_engine.runtime.measure.modules.module_totals import ModuleTotal, module_drifts
from dtype_engine.runtime.measure.modules.row_comparison import ModuleSums, RowComparison
from dtype_engine.runtime.model.torch_private import version_of
from dtype_engine.runtime.numerics.compare.element_sums import ElementSums

OnModules = Callable[[tuple[ModuleDrift, ...]], None]
_MOST_WAITING = 20
_MOST_WAITING_BYTES = 1 << 24
_MODULES_EVERY = 10
"""Times the interval in which progress is told: filling in the sums so far takes some milliseconds."""
_DISTRIBUTIONS = ("logits", "logits_per_image", "start_logits", "prediction_logits")


def is_distribution(name: str, output: torch.Tensor) -> bool:
    """Whether the output field `name` holds logits over classes or tokens in its last dimension."""
    return name in _DISTRIBUTIONS and output.ndim >= 2 and output.shape[-1] >= 2


def compare_output(kept: KeptRows, candidate: torch.Tensor) -> ModuleSums:
    """One output against what is kept of the reference's."""
    comparison, sums = RowComparison(), ModuleSums()
    comparison.add(kept, candidate, sums, alone=True)
    comparison.finish()
    return sums


class WaitingOutputs:
    """Outputs that wait to be looked at, some twenty in a row: right after a large product the code for that is in no cache any
    more, and takes four times as long.

    An output that something writes to in the meantime is missed: its module's name is added to `at_once`, whose outputs do not
    wait, and the pass has to be run again.
    """

    def __init__(self, at_once: set[str]) -> None:
        self.missed = False
        self._at_once = at_once
        self._waiting: list[tuple[str, torch.Tensor, int, Any]] = []
        self._nbytes = 0

    def add(self, module: str, output: torch.Tensor, what: Any) -> list[tuple[torch.Tensor, Any]]:
        """Take in the output of a module. Returns those that are to be looked at now, with the `what` they were taken in with."""
        if module in self._at_once:
            return [(output, what)]
        alias = output.detach()  # where a module returns its weight: that gets other values when the pass is over
        self._waiting.append((module, alias, version_of(output), what))
        self._nbytes += output.nbytes
        return self.take() if len(self._waiting) >= _MOST_WAITING or self._nbytes > _MOST_WAITING_BYTES else []

    def take(self) -> list[tuple[torch.Tensor, Any]]:
        """All that wait; nothing does any more."""
        taken = []
        for module, output, version, what in self._waiting:
            if version_of(output) == version:
                taken.append((output, what))
            else:
                self._at_once.add(module)
                self.missed = True
        self._waiting.clear()
        self._nbytes = 0
        return taken


class _Last:
    """The output of the module that returned last, by which its parent's is known again: it often is the very same, or a view of
    all of it. It is held here, so that its memory is no other tensor's.
    """

    __slots__ = ("output", "version")

    def __init__(self, output: torch.Tensor) -> None:
        self.output = output
        self.version = version_of(output)

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


@dataclass(slots=True)
class _Kept:
    """What is kept of one output, once it was looked at: `rows` is None where it did not fit. names: whose output it is.
    taken: it is or will be looked at.
    """

    names: list[tuple[str, int]] = field(default_factory=list)
    rows: KeptRows | None = None
    known: bool = False
    taken: bool = False


class OutputRecorder:
    """Observes a reference pass: keeps `rows` of every module output, or all of them `in_full`, up to `budget` bytes.

    `kept` has them by (module, call) after `finish`, `left_out` the modules with an output that did not fit, `main` those that gave
    the main output. `on_progress(calls)`.
    at_once: modules whose outputs are written to after they returned, as far as it is known; see `WaitingOutputs`. wanted: the
    modules whose outputs are kept, None for all; that of the one that gives the main output always is.
    """

    def __init__(
        self,
        budget: int,
        at_once: set[str],
        on_progress: Callable[[int], None] = lambda calls: None,
        in_full: bool = False,
        rows: int = MOST_ROWS,
        wanted: Container[str] | None = None,
    ) -> None:
        self.kept: dict[tuple[str, int], KeptRows] = {}
        self.left_out: set[str] = set()
        self.main: list[str] = []
        self.calls = 0
        self._budget = budget
        self._on_progress = on_progress
        self._in_full = in_full
        self._wanted = wanted
        self._rows = RowKeeper(in_full, rows)
        self._throttle = Throttle(first=False)
        self._outputs = WaitingOutputs(at_once)
        self._last: tuple[_Last, _Kept] | None = None

    def finish(self, output: torch.Tensor | None = None) -> bool:
        """The pass is over; `output` is the main one. False where outputs were missed: it has to be run again, with another
        recorder.
        """
        main = _Kept()
        if output is not None and self._last is not None and self._last[0].is_same(output):
            main = self._last[1]
            self.main = [module for module, _ in main.names]
            if not main.taken:
                self._keep([(output, main)])
        self._keep(self._outputs.take())
        if main.rows is not None:
            main.rows.is_main = True
        self._rows.finish()
        return not self._outputs.missed

    def copy_of(self, output: torch.Tensor) -> torch.Tensor | None:
        """The copy kept of this very tensor, if all of it was kept as the last module's: the logits mostly are, and the largest."""
        if self._last is None or not self._last[0].is_same(output):
            return None
        kept = self._last[1].rows
        return kept.rows.view(kept.shape) if kept is not None and kept.index is None else None

    def replay(self, module: str, reading: object) -> None:
        """Never called: the reference reuses no earlier pass's outputs."""
        raise AssertionError("the reference reuses nothing")

    def __call__(self, module: str, call: int, output: torch.Tensor) -> None:
        self.calls += 1
        if self._last is None or not self._last[0].is_same(output):
            self._last = _Last(output), _Kept()
        kept = self._last[1]
        kept.names.append((module, call))
        if kept.known:
            self._note(kept)
        elif not kept.taken and (self._wanted is None or module in self._wanted):
            kept.taken = True
            self._keep(self._outputs.add(module, output, kept))
        if self._throttle.due():
            self._on_progress(self.calls)

    def _keep(self, outputs: list[tuple[torch.Tensor, _Kept]]) -> None:
        for output, kept in outputs:
            kept.known = True
            if not self._in_full or output.nbytes <= self._budget:
                rows = self._rows.keep(output)
                if rows.rows.nbytes <= self._budget:
                    self._budget -= rows.rows.nbytes
                    kept.rows = rows
            self._note(kept)

    def _note(self, kept: _Kept) -> None:
        for name in kept.names:
            if kept.rows is not None:
                self.kept[name] = kept.rows
            else:
                self.left_out.add(name[0])


class OutputComparer:
    """Observes a candidate pass: compares each module output with the reference's; `sums` has this pass's by module.

    Sums are filled in many at once; `finish` once the pass is over.

    before: the totals of earlier passes, which `on_modules` is given together with these. `on_progress(calls)`. left: in how many
    sequences beside this not all modules were compared; compared: all are in this one; routed: as for `module_drifts`.
    """

    def __init__(
        self,
        reference: Mapping[tuple[str, int], KeptRows],
        before: Mapping[str, ModuleTotal],
        on_progress: Callable[[int], None],
        on_modules: OnModules,
        left: int = 0,
        compared: bool = True,
        routed: bool = False,
    ) -> None:
        self.sums: dict[str, ModuleSums] = {}
        self._reference = reference
        self._before = before
        self._left = left
        self._compared = compared
        self._routed = routed
        self._on_progress = on_progress
        self._on_modules = on_modules
        self._calls = 0
        self._rows = RowComparison()
        self._found: list[tuple[str, ModuleSums]] = []
        """Of each call: sums that may have to be filled in."""
        self._unreported: set[str] = set()
        self._throttle = Throttle(first=False)
        self._modules_throttle = Throttle(first=False, every=_MODULES_EVERY)
        self._last: tuple[_Last, KeptRows, ModuleSums] | None = None

    def __call__(self, module: str, call: int, output: torch.Tensor) -> ModuleSums | None:
        kept = self._reference.get((module, call))
        if kept is None:
            self._report()
            return None
        last = self._last
        if last is None or last[1] is not kept or not last[0].is_same(output):
            if last is not None and last[1].is_main:
                self._compare_main(*last)
            self._last = last = _Last(output), kept, ModuleSums()
            if not kept.is_main:
                self._rows.add(kept, output, last[2])
        self._found.append((module, last[2]))
        self._report()
        return last[2]

    def restart(self) -> None:
        """The pass is run again from its beginning: what was compared so far does not count."""
        for found in (self.sums, self._found, self._unreported):
            found.clear()
        self._rows = RowComparison()
        self._last = None

    def replay(self, module: str, reading: ModuleSums | None) -> None:
        """Add one call's sums to its module's."""
        if reading is not None:
            self._found.append((module, reading))
        self._report()

    def finish(self, output: torch.Tensor, exact: ElementSums) -> None:
        """Fill in all sums. Modules that gave the main output itself have its sums, over all of it."""
        if self._last is not None and self._last[0].is_same(output):
            self._rows.finish()
            sums = self._last[2]
            bad = exact.nonfinite_reference and not exact.energy
            sums.energy, sums.noise, sums.max_abs = exact.energy, exact.noise, exact.max_abs
            sums.nonfinite, sums.comparable, sums.variance = exact.nonfinite, not bad, 0.0
        elif self._last is not None and self._last[1].is_main:
            self._compare_main(*self._last)
        self._last = None
        self._fill_in()

    def _compare_main(self, last: _Last, kept: KeptRows, sums: ModuleSums) -> None:
        """Compare the rows of what returned last, where that of the reference was the main output and this is not. Rows of
        what is are not: they are many, and all of it is compared.
        """
        if last.version == version_of(last.output):
            self._rows.add(kept, last.output, sums)
        else:
            sums.comparable = False  # something wrote to it

    def _fill_in(self) -> None:
        """All but the output of the module that returned last: it may be the main output."""
        self._rows.finish()
        last = self._last[2] if self._last is not None else None
        for module, sums in self._found:
            if sums is not last:
                self.sums.setdefault(module, ModuleSums()).add(sums)
                self._unreported.add(module)
        self._found = [(module, sums) for module, sums in self._found if sums is last]

    def _report(self) -> None:
        self._calls += 1
        if not self._throttle.due():
            return
        self._on_progress(self._calls)
        if self._modules_throttle.due():
            self._fill_in()
            news = {name: self._total(name) for name in self._unreported}
            self._unreported.clear()
            self._on_modules(module_drifts(news, self._left, self._routed))

    def _total(self, module: str) -> ModuleTotal:
        return self._before.get(module, ModuleTotal()).with_sequence(self.sums[module], self._compared)
