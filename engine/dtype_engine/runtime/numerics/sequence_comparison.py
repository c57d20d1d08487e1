"""One sequence's output against the reference's: sums over elements, and the figures of every position. What they mean: `metrics`.

Outputs go by in chunks of rows, so that no second copy of them is needed. On the CPU torch's threads share each operation, which
writes over one of three buffers that stay in their caches: new memory for every result takes several times as long as the
arithmetic, and so does what follows where one thread has gone over what both had written. Python threads with a chunk each wait for
the interpreter's lock a third of the time (20 µs an operation; Intel Xeon).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

_CHUNK_ELEMENTS = 1 << 17
"""Elements of a chunk at least, and on the CPU `_THREAD_ELEMENTS` for each thread: three times that in float64 stay in the cache of
a core, or where that is small in the one that cores share, and of half as many the calls cost more.
"""
_THREAD_ELEMENTS = 1 << 16
_EXP_IN_RANGE = 500.0
"""e^x of float64, and sums of 10^90 of them, are in range for |x| up to this."""
_CANCELLED = 1e-3
"""Σc² as Σr² + 2 Σrδ + Σδ² is exact to 10^-13 where it is at least this share of Σr²."""
_INTEGERS = {
    torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64,
}  # fmt: skip
"""Those that have the bits of a float."""


@dataclass(slots=True)
class ElementSums:
    """Sums over elements of Δ = c - r: |Δ|, the largest |Δ|, Δ², r², c², rc, and counts of what is not finite."""

    elements: int = 0
    nonfinite: int = 0
    nonfinite_reference: int = 0
    sum_abs: float = 0.0
    max_abs: float = 0.0
    noise: float = 0.0
    energy: float = 0.0
    energy_candidate: float = 0.0
    product: float = 0.0

    def add(self, other: ElementSums) -> None:
        """Take in the sums of further elements."""
        self.elements += other.elements
        self.nonfinite += other.nonfinite
        self.nonfinite_reference += other.nonfinite_reference
        self.sum_abs += other.sum_abs
        self.max_abs = max(self.max_abs, other.max_abs)
        self.noise += other.noise
        self.energy += other.energy
        self.energy_candidate += other.energy_candidate
        self.product += other.product


def _element_sums(r: torch.Tensor, c: torch.Tensor) -> ElementSums:
    """Of one chunk, in float64; `c` is `r` where they are equal."""
    equal = c is r
    r, c = r.reshape(-1), c.reshape(-1)
    sums = ElementSums(elements=r.numel())
    if equal and math.isfinite(energy := float(torch.dot(r, r))):
        sums.energy = sums.energy_candidate = sums.product = energy
        return sums
    delta = c - r
    noise = float(torch.dot(delta, delta))
    if not math.isfinite(noise):
        # Infinities that both have (masked logits) are no drift; where only one is not finite, all figures are.
        finite = torch.isfinite(r) & torch.isfinite(c)
        same = (r == c) | (torch.isnan(r) & torch.isnan(c))
        sums.nonfinite = int((~torch.isfinite(c) & ~same).sum())
        sums.nonfinite_reference = int((torch.isnan(r) | torch.isposinf(r)).sum())
        if bool((~finite & ~same).any()):
            sums.sum_abs = sums.max_abs = sums.noise = math.inf
        r, c = r[finite], c[finite]
        delta = c - r
        noise = float(torch.dot(delta, delta))
    sums.noise += noise
    sums.energy = float(torch.dot(r, r))
    sums.energy_candidate = float(torch.dot(c, c))
    sums.product = float(torch.dot(r, c))
    absolute = delta.abs_()
    sums.sum_abs += float(absolute.sum())
    sums.max_abs = max(sums.max_abs, float(absolute.max()) if absolute.numel() else 0.0)
    return sums


def _compare_elsewhere(reference: torch.Tensor, candidate: torch.Tensor, into: SequenceComparison) -> None:
    """Compare [rows, width] chunk by chunk, on their device."""
    step = max(1, _CHUNK_ELEMENTS // max(1, reference.shape[1]))
    for start in range(0, reference.shape[0], step):
        rows = slice(start, start + step)
        into.add(_chunk_sums(reference[rows], candidate[rows], rows, into.positions))


def compare_sequence(reference: torch.Tensor, candidate: torch.Tensor, into: SequenceComparison) -> None:
    """Compare two outputs, [rows, width] both, and take what comes of it `into` their sequence."""
    on_cpu = {reference.device.type, candidate.device.type} == {"cpu"}
    (_compare_on_cpu if on_cpu else _compare_elsewhere)(reference, candidate, into)


def _chunk_sums(
    reference: torch.Tensor, candidate: torch.Tensor, rows: slice, positions: PositionFigures | None
) -> ElementSums:
    """The sums of some rows, whatever is in them, and the figures of their positions filled in."""
    r, c = _in_float64(reference, candidate)
    if positions is not None:
        positions.compare(rows, r, c)
    return _element_sums(r, c)


def _compare_on_cpu(reference: torch.Tensor, candidate: torch.Tensor, into: SequenceComparison) -> None:
    """The same on the CPU, in memory that every chunk uses again."""
    count, width = reference.shape
    most = max(_CHUNK_ELEMENTS, _THREAD_ELEMENTS * torch.get_num_threads())
    step = max(1, most // max(1, width))
    finite = _FinitePositions(count) if into.positions is not None else None
    with torch.no_grad():
        buffers = [torch.empty(min(step, count), width, dtype=torch.float64) for _ in range(3)]
        for start in range(0, count, step):
            rows = slice(start, min(start + step, count))
            r, c = reference[rows], candidate[rows]
            used = [buffer[: len(r)] for buffer in buffers]
            if r.dtype == c.dtype and torch.equal(r, c):
                sums = _equal_sums(r, rows, finite, used)
            else:
                sums = _finite_sums(r, c, rows, finite, used)
            into.add(_chunk_sums(r, c, rows, into.positions) if sums is None else sums)
        if finite is not None and into.positions is not None:
            finite.fill(into.positions, reference, candidate)


def _equal_sums(
    output: torch.Tensor, rows: slice, positions: _FinitePositions | None, buffers: Sequence[torch.Tensor]
) -> ElementSums | None:
    """As `_finite_sums`, of two outputs that are the same."""
    flat = _widen(output, buffers[0]).reshape(-1)
    energy = float(torch.dot(flat, flat))
    if not math.isfinite(energy):
        return None
    if positions is not None:
        positions.add_equal(rows, output, buffers[0])
    return ElementSums(len(flat), energy=energy, energy_candidate=energy, product=energy)


def _finite_sums(
    reference: torch.Tensor,
    candidate: torch.Tensor,
    rows: slice,
    positions: _FinitePositions | None,
    buffers: Sequence[torch.Tensor],
) -> ElementSums | None:
    """The sums of some rows of which every value is finite, whose positions are added; None where one is not.

    Every operation writes over one of `buffers`, three of float64 [rows, width].
    """
    r, c, delta = _widen(reference, buffers[0]), _widen(candidate, buffers[1]), buffers[2]
    torch.sub(c, r, out=delta)
    flat_r, flat_delta = r.view(-1), delta.view(-1)
    noise = float(torch.dot(flat_delta, flat_delta))
    if not math.isfinite(noise):
        return None
    energy, change = float(torch.dot(flat_r, flat_r)), float(torch.dot(flat_r, flat_delta))
    energy_candidate = energy + 2 * change + noise
    if energy_candidate < _CANCELLED * energy:
        energy_candidate = float(torch.dot(c.view(-1), c.view(-1)))
    if positions is not None:
        positions.add(rows, reference, candidate, buffers)
    sums = ElementSums(
        len(flat_r), noise=noise, energy=energy, energy_candidate=energy_candidate, product=energy + change
    )
    sums.sum_abs = float(flat_delta.abs_().sum())
    sums.max_abs = float(flat_delta.amax()) if len(flat_delta) else 0.0
    return sums


def _widen(values: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """Write values over a buffer of float64, float16 by way of float32: torch has vector code for these two steps alone."""
    return into.copy_(values.float() if values.dtype == torch.float16 else values)


class SequenceComparison:
    """What one sequence gave: the sums of its chunks, and the figures of its positions where they have distributions.

    rows: how many positions it has. sums: over all its chunks; those over several sequences are taken chunk by chunk.
    """

    def __init__(self, rows: int, positions: PositionFigures | None) -> None:
        self.rows = rows
        self.positions = positions
        self.chunks: list[ElementSums] = []
        self.sums = ElementSums()

    def add(self, chunk: ElementSums) -> None:
        """Take in the sums of a chunk."""
        self.chunks.append(chunk)
        self.sums.add(chunk)


@dataclass(slots=True)
class PositionFigures:
    """The figures of each position of one sequence: KL, whether the likeliest class is the same, ln p and ln q of the label."""

    labels: torch.Tensor | None
    kl: torch.Tensor
    same_top: torch.Tensor
    log_p: torch.Tensor
    log_q: torch.Tensor

    @classmethod
    def of(cls, count: int, labels: torch.Tensor | None) -> PositionFigures:
        kl, log_p, log_q = (torch.zeros(count, dtype=torch.float64) for _ in range(3))
        return cls(labels, kl, torch.zeros(count, dtype=torch.bool), log_p, log_q)

    def keep_scored(self) -> None:
        """Once all rows are filled in: keep ln p and ln q of positions with a label alone."""
        if self.labels is not None:
            scored = (self.labels >= 0).cpu()
            self.log_p, self.log_q = self.log_p[scored], self.log_q[scored]

    def compare(self, rows: slice, r: torch.Tensor, c: torch.Tensor) -> None:
        """Fill in some rows from their logits, float64 [rows, classes]."""
        log_p = torch.log_softmax(r, -1)
        if c is r:
            log_q = log_p
            self.same_top[rows] = True  # and the KL of zero is there already
        else:
            log_q = torch.log_softmax(c, -1)
            p, ratio = log_p.exp(), log_p - log_q
            kl = (p * ratio).sum(-1)
            if not bool(torch.isfinite(kl).all()):
                # 0 ln 0 = 0: a class that the reference rules out adds nothing, whatever the candidate says of it.
                kl = torch.where(p > 0, p * ratio, torch.zeros_like(p)).sum(-1)
            self.kl[rows] = kl.cpu()
            self.same_top[rows] = _likeliest(r) == _likeliest(c)
        if self.labels is not None:
            index = self.labels[rows].clamp(min=0)[:, None]
            self.log_p[rows] = log_p.gather(1, index)[:, 0].cpu()
            self.log_q[rows] = log_q.gather(1, index)[:, 0].cpu()


class _Exponentials:
    """Of the rows of logits: the likeliest class, what is taken off before e^x (0 where e^x is in range), and Σ e^(x - shift)."""

    def __init__(self, count: int) -> None:
        self.top = np.zeros(count, dtype=np.int64)
        self.shift, self.total = np.zeros(count), np.ones(count)

    def take(self, rows: slice, logits: torch.Tensor, wide: torch.Tensor) -> None:
        """Some rows, and the same in float64, over which e^(x - shift) is written."""
        values = wide.numpy()
        top = self.top[rows] = _first_of_largest(logits, values)
        largest = values[np.arange(len(values)), top]
        if np.abs(largest).max(initial=0.0) > _EXP_IN_RANGE:
            self.shift[rows] = largest
            wide.sub_(torch.from_numpy(largest)[:, None])
        self.total[rows] = wide.exp_().sum(-1).numpy()

    def log_of(self, labels: torch.Tensor, logits: torch.Tensor) -> np.ndarray:
        """The logarithm of the probability of one class in each row."""
        chosen: np.ndarray = logits.detach().gather(1, labels[:, None])[:, 0].double().numpy()
        return chosen - self.shift - np.log(self.total)


class _FinitePositions:
    """The positions of one sequence whose logits are all finite, as they go by; `fill` has their figures, once all have.

    With δ = c - r a position's KL is ln Σ e^c - ln Σ e^r - Σ p δ.
    """

    def __init__(self, count: int) -> None:
        self._known = np.zeros(count, dtype=np.bool_)
        self._of_reference, self._of_candidate = _Exponentials(count), _Exponentials(count)
        self._moved = np.zeros(count)
        """Σ e^(r - shift) δ."""

    def add(
        self, rows: slice, reference: torch.Tensor, candidate: torch.Tensor, buffers: Sequence[torch.Tensor]
    ) -> None:
        """Some rows; `buffers` have them and their δ in float64, and the first two are written over."""
        r, c, delta = buffers
        self._of_reference.take(rows, reference, r)
        self._of_candidate.take(rows, candidate, c)
        one = len(r) == 1
        self._moved[rows] = float(torch.dot(r[0], delta[0])) if one else r.mul_(delta).sum(-1).numpy()
        self._known[rows] = True

    def add_equal(self, rows: slice, logits: torch.Tensor, wide: torch.Tensor) -> None:
        """The same for logits that both have."""
        self._of_reference.take(rows, logits, wide)
        for figure in ("top", "shift", "total"):
            getattr(self._of_candidate, figure)[rows] = getattr(self._of_reference, figure)[rows]
        self._known[rows] = True

    def fill(self, figures: PositionFigures, reference: torch.Tensor, candidate: torch.Tensor) -> None:
        """Fill in the figures of these positions, of the outputs [rows, classes] of all."""
        known, r, c = self._known, self._of_reference, self._of_candidate
        kl = (c.shift - r.shift) + np.log(c.total / r.total) - self._moved / r.total
        figures.kl.numpy()[known] = kl[known]
        figures.same_top.numpy()[known] = (r.top == c.top)[known]
        if figures.labels is not None and known.any():
            labels = figures.labels.clamp(min=0)
            figures.log_p.numpy()[known] = r.log_of(labels, reference)[known]
            figures.log_q.numpy()[known] = c.log_of(labels, candidate)[known]


def _first_of_largest(logits: torch.Tensor, wide: np.ndarray) -> np.ndarray:
    """The first of the largest of each row [rows, classes], all of them finite; `wide` has the same in float64.

    Positive floats are in the order of their bits as integers, and above all that are negative. So what both threads have just
    written need not be read by one: logits of bfloat16 are a quarter of it. torch's own takes six times as long.
    """
    integers = _INTEGERS.get(logits.dtype)
    if integers is not None:
        bits = logits.detach().view(integers).numpy()
        top: np.ndarray = bits.argmax(-1)
        if (bits[np.arange(len(bits)), top] > 0).all():
            return top
    return np.asarray(wide.argmax(-1))


def _likeliest(logits: torch.Tensor) -> torch.Tensor:
    """The first of the largest of each row, on the CPU: numpy's argmax there takes a sixth of the time of torch's."""
    return torch.from_numpy(logits.numpy().argmax(-1)) if logits.device.type == "cpu" else logits.argmax(-1).cpu()


def _in_float64(reference: torch.Tensor, candidate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in float64; the very same tensor twice where they are equal, which spares most of the arithmetic."""
    r = reference.double()
    equal = reference.dtype == candidate.dtype and torch.equal(reference, candidate)
    return r, r if equal else candidate.double()
