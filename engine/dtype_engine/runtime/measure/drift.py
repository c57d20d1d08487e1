"""Comparing a candidate with the reference: the main output, and every module's as the pass goes by."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import psutil
import torch

from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import NoForward
from dtype_engine.core.options import RunSettings
from dtype_engine.results.drift import ModuleDrift, OutputDrift
from dtype_engine.runtime.inputs import Batch, Inputs
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.numerics.metrics import OutputComparison, sqnr_db
from dtype_engine.runtime.passes.runner import Candidate, ForwardRunner, RetryUnderRules, main_output
from dtype_engine.runtime.passes.trace import Trace

OnModules = Callable[[tuple[ModuleDrift, ...]], None]
OnProgress = Callable[[str, int, int | None], None]
_DISTRIBUTIONS = ("logits", "logits_per_image", "start_logits", "prediction_logits")
_WHOLE_SHARE = 50
"""A module with at most this share (1/50) of a pass's calls is run whole or not at all."""
_TELL_EVERY_S = 0.1


@dataclass(slots=True)
class _Record:
    """What the reference gave for one batch. Module outputs by (name, call), each with its energy Σr²."""

    output_name: str
    output: torch.Tensor
    modules: dict[tuple[str, int], tuple[torch.Tensor, float]]
    left_out: set[str]
    seconds: float
    calls: int

    @property
    def nbytes(self) -> int:
        held = {tensor.data_ptr(): tensor.nbytes for tensor, _ in self.modules.values()}
        return sum({**held, self.output.data_ptr(): self.output.nbytes}.values())


@dataclass(slots=True)
class _Sums:
    """One module over all its calls so far."""

    energy: float = 0.0
    noise: float = 0.0
    max_abs: float = 0.0
    nonfinite: int = 0
    comparable: bool = True


@dataclass(slots=True)
class Measurement:
    """The result of `DriftMeter.measure`."""

    output_name: str
    output: OutputDrift
    modules: tuple[ModuleDrift, ...]
    reference_seconds: float
    candidate_seconds: float
    reused: bool
    notices: tuple[str, ...] = ()
    dimensions: int = 0
    """Of the main output: 3 for a distribution at every token, 2 for one an example."""


@dataclass
class DriftMeter:
    """Measures drift of a live model over its inputs.

    The reference's outputs are kept between measurements within `budget` bytes (by default a quarter of the memory
    that was free when it was made). For the batches that do not fit the reference runs again each time, right before
    the candidate, so nothing grows with the amount of calibration text.
    """

    model: LiveModel
    inputs: Inputs
    settings: RunSettings = field(default_factory=RunSettings)
    budget: int = field(default_factory=lambda: psutil.virtual_memory().available // 4)
    reuse: bool = True
    _first_use: dict[str, int] = field(default_factory=dict)
    _traces: dict[int, Trace] = field(default_factory=dict)
    _records: dict[int, _Record] = field(default_factory=dict)
    _seconds: dict[int, float] = field(default_factory=dict)
    _calls: dict[int, int] = field(default_factory=dict)

    def measure(
        self,
        on_progress: OnProgress = lambda run, done, total: None,
        on_modules: OnModules = lambda modules: None,
        cancelled: IsCancelled = never,
    ) -> Measurement:
        """Run what has to be run and compare. `on_progress` hears ("reference" | "candidate", module calls done,
        of how many, None while unknown); `on_modules` the readings that changed, at most ten times a second.

        Raises NoForward, KernelError, Cancelled.
        """
        with ForwardRunner(self.model, self.settings, cancelled) as passes:
            passes.first_use = self._first_use
            return self._measure(passes, on_progress, on_modules)

    def _measure(self, passes: ForwardRunner, on_progress: OnProgress, on_modules: OnModules) -> Measurement:
        comparison: OutputComparison | None = None
        sums: dict[str, _Sums] = {}
        output_name = ""
        left_out: set[str] = set()
        candidate_seconds = 0.0
        reused = False
        done = 0
        for index, batch in enumerate(self.inputs.batches):
            record = self._records.get(index) or self._reference(passes, index, batch, on_progress)
            left_out |= record.left_out
            output_name = record.output_name
            progress = partial(self._tell_progress, on_progress, done)
            comparer = _Comparer(record, sums, progress, on_modules)
            ran = self._candidate(passes, index, batch, comparer, record.calls // _WHOLE_SHARE)
            done += record.calls
            candidate_seconds += ran.seconds
            reused = reused or ran.reused
            name, candidate = main_output(ran.output)
            if name != record.output_name or candidate.shape != record.output.shape:
                raise NoForward(
                    f"the candidate's output ({name}, {tuple(candidate.shape)}) is not the reference's "
                    f"({record.output_name}, {tuple(record.output.shape)}), so they can't be compared"
                )
            if comparison is None:
                comparison = OutputComparison(is_distribution(name, candidate))
            comparison.add(record.output, candidate, batch.next_tokens)
            for module, found in comparer.found.items():
                _merge(sums.setdefault(module, _Sums()), found)
            on_modules(_readings(sums))
        if comparison is None:
            raise NoForward("there are no inputs to run the model on")
        notices = []
        if left_out:
            notices.append(
                f"{len(left_out)} modules are not compared: the reference's outputs do not fit the memory budget"
            )
        return Measurement(
            output_name,
            comparison.result(),
            _readings(sums),
            sum(self._seconds.values()),
            candidate_seconds,
            reused,
            tuple(notices),
            candidate.ndim,
        )

    def _candidate(self, passes: ForwardRunner, index: int, batch: Batch, comparer: _Comparer, whole: int) -> Candidate:
        """Run the candidate on one batch, what is unchanged since the last measurement left out, and keep its trace."""
        earlier = self._traces.pop(index, None)
        kept = sum(record.nbytes for record in self._records.values()) + sum(
            trace.nbytes for trace in self._traces.values()
        )
        while True:
            try:
                ran = passes.candidate(batch, comparer, self.budget - kept, earlier if self.reuse else None, whole)
                break
            except RetryUnderRules:
                comparer.restart()
        if self.reuse and ran.trace.calls:
            self._traces[index] = ran.trace
        return ran

    def _tell_progress(self, on_progress: OnProgress, before: int, calls: int) -> None:
        on_progress("candidate", before + calls, self._total_calls())

    def _total_calls(self) -> int | None:
        """Module calls of one pass over all inputs, once every batch was run."""
        return sum(self._calls.values()) if len(self._calls) == len(self.inputs.batches) else None

    def _reference(self, passes: ForwardRunner, index: int, batch: Batch, on_progress: OnProgress) -> _Record:
        """Run the reference on one batch and keep what it gave if that fits the budget."""
        room = self.budget - sum(record.nbytes for record in self._records.values())
        before = sum(calls for known, calls in self._calls.items() if known < index)
        while True:
            watcher = _Recorder(
                max(room, self.budget // 4), lambda done: on_progress("reference", before + done, self._total_calls())
            )
            try:
                output, seconds = passes.reference(batch, watcher)
                break
            except RetryUnderRules:
                continue
        name, tensor = main_output(output)
        kept = watcher.copy_of(tensor)
        own = kept if kept is not None else tensor.detach().clone()
        record = _Record(name, own, watcher.kept, watcher.left_out, seconds, watcher.calls)
        self._seconds[index], self._calls[index] = seconds, watcher.calls
        if record.nbytes <= room:
            self._records[index] = record
        return record


class _Comparer:
    """Compares each module's output with the record as it comes; `found` has one pass's sums by module."""

    def __init__(
        self, record: _Record, before: dict[str, _Sums], on_progress: Callable[[int], None], on_modules: OnModules
    ) -> None:
        self.found: dict[str, _Sums] = {}
        self._record = record
        self._before = before
        self._on_progress = on_progress
        self._on_modules = on_modules
        self._calls = 0
        self._untold: set[str] = set()
        self._told = time.perf_counter()
        self._last: tuple[torch.Tensor, int, torch.Tensor, _Sums] | None = None

    def __call__(self, module: str, call: int, output: torch.Tensor) -> _Sums | None:
        kept = self._record.modules.get((module, call))
        if kept is None:
            self._tell()
            return None
        last = self._last
        # A parent often returns its last child's very tensor: it is compared once for both.
        again = last is not None and last[0] is output and last[1] == output._version and last[2] is kept[0]
        sums = last[3] if again and last is not None else _compared(kept[0], kept[1], output)
        self._last = (output, output._version, kept[0], sums)
        self.replay(module, sums)
        return sums

    def restart(self) -> None:
        """The pass is run again from its beginning: what was compared so far does not count."""
        self.found.clear()
        self._untold.clear()
        self._last = None

    def replay(self, module: str, reading: _Sums | None) -> None:
        """Add one call's sums to its module's."""
        if reading is not None:
            _merge(self.found.setdefault(module, _Sums()), reading)
            self._untold.add(module)
        self._tell()

    def _tell(self) -> None:
        self._calls += 1
        now = time.perf_counter()
        if now - self._told >= _TELL_EVERY_S:
            self._told = now
            self._on_progress(self._calls)
            news = {name: _merged(self._before.get(name), self.found[name]) for name in self._untold}
            self._untold.clear()
            self._on_modules(_readings(news))


class _Recorder:
    """Keeps a copy of every module output of a reference pass, up to `room` bytes."""

    def __init__(self, room: int, on_progress: Callable[[int], None]) -> None:
        self.kept: dict[tuple[str, int], tuple[torch.Tensor, float]] = {}
        self.left_out: set[str] = set()
        self.calls = 0
        self._room = room
        self._on_progress = on_progress
        self._told = time.perf_counter()
        self._last: tuple[torch.Tensor, int, tuple[torch.Tensor, float]] | None = None

    def copy_of(self, output: torch.Tensor) -> torch.Tensor | None:
        """The copy kept of this very tensor, if it was the last module's: the logits mostly are, and the largest of all."""
        last = self._last
        return last[2][0] if last is not None and last[0] is output and last[1] == output._version else None

    def replay(self, module: str, reading: object) -> None:
        raise AssertionError("nothing stands in for the reference")

    def __call__(self, module: str, call: int, output: torch.Tensor) -> None:
        self.calls += 1
        # A parent often returns its last child's very tensor: one copy serves both, unless it was written to since.
        if self._last is not None and self._last[0] is output and self._last[1] == output._version:
            self.kept[module, call] = self._last[2]
        elif output.nbytes <= self._room:
            copy = output.detach().clone(memory_format=torch.contiguous_format)
            entry = (copy, _energy(copy))
            self.kept[module, call] = entry
            self._room -= copy.nbytes
            self._last = (output, output._version, entry)
        else:
            self.left_out.add(module)
        now = time.perf_counter()
        if now - self._told >= _TELL_EVERY_S:
            self._told = now
            self._on_progress(self.calls)


def _energy(tensor: torch.Tensor) -> float:
    """Σx², in the tensor's own dtype and, where that overflows, in float64."""
    flat = tensor.reshape(-1)
    found = float(torch.dot(flat, flat)) if flat.numel() else 0.0
    return found if math.isfinite(found) else float(flat.double().square().sum())


def _compared(reference: torch.Tensor, energy: float, candidate: torch.Tensor) -> _Sums:
    """One output against the reference's, whose energy Σr² is known."""
    if candidate.shape != reference.shape:
        # Experts see other tokens when the routing changes: there is nothing to compare element by element.
        return _Sums(comparable=False)
    if candidate.dtype == reference.dtype and torch.equal(candidate, reference):
        return _Sums(energy)
    delta = candidate.detach().to(reference.dtype, copy=True).sub_(reference)
    noise = _energy(delta)
    nonfinite = 0
    if not math.isfinite(noise):
        nonfinite = int((torch.isfinite(reference) & ~torch.isfinite(candidate)).sum())
        both = torch.isfinite(delta)
        if not nonfinite and not bool(both.any()):
            return _Sums(comparable=False)  # nothing is finite on either side: that is no agreement
        noise = math.inf if nonfinite else _energy(delta[both])
        delta = delta[both]
        energy = _energy(reference[torch.isfinite(reference)])
    max_abs = math.inf if nonfinite else 0.0
    if delta.numel():
        low, high = torch.aminmax(delta)
        max_abs = max(max_abs, -float(low), float(high))
    return _Sums(energy, noise, max_abs, nonfinite)


def _merge(into: _Sums, other: _Sums) -> None:
    into.energy += other.energy
    into.noise += other.noise
    into.max_abs = max(into.max_abs, other.max_abs)
    into.nonfinite += other.nonfinite
    into.comparable = into.comparable and other.comparable


def _merged(first: _Sums | None, second: _Sums) -> _Sums:
    both = _Sums()
    for part in (first, second):
        if part is not None:
            _merge(both, part)
    return both


def _readings(sums: dict[str, _Sums]) -> tuple[ModuleDrift, ...]:
    return tuple(
        ModuleDrift(
            name, sqnr_db(found.energy, found.noise) if found.comparable else None, found.max_abs, found.nonfinite
        )
        for name, found in sums.items()
    )


def is_distribution(name: str, output: torch.Tensor) -> bool:
    """Whether the output holds logits over classes or tokens in its last dimension."""
    return name in _DISTRIBUTIONS and output.ndim >= 2 and output.shape[-1] >= 2
