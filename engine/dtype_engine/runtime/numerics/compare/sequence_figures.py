"""The figures of one sequence: a reference output r and a candidate's output c, [positions, classes] where they are logits.

With p = softmax(r), q = softmax(c) and Δ = c - r, the divergence of a position in nats is

    KL = Σ p (ln p - ln q) = ln Σ e^c - ln Σ e^r - Σ p Δ,    where 0 ln 0 = 0.

Everything is computed in float64, whatever the outputs' dtypes are, in chunks of rows: no second copy of the outputs is made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dtype_engine.runtime.numerics.compare.element_sums import (
    ElementSums,
    element_sums,
    sum_chunks,
    sums_of_any,
    sums_of_small,
    widen,
)

_LOG2_E = 1 / math.log(2)
_CHUNK_ELEMENTS = 1 << 17
"""Logits of a chunk: four MB of float64 buffers stay in a cache that cores share; in smaller chunks the calls cost more."""
_GPU_CHUNK_ELEMENTS = 1 << 21
"""On a GPU: 100 MB of such copies."""


@dataclass(slots=True)
class PositionFigures:
    """The figures of each position of one sequence of logits, on the CPU, float64 [positions] where nothing else is said."""

    kl: torch.Tensor
    """The KL divergence in nats, NaN where the reference has NaN or plus infinity."""
    same_top: torch.Tensor
    """Whether the likeliest class, the first of the largest logits, is the same: bool."""
    log_p: torch.Tensor
    """ln p of the next token's class, of the positions that have one."""
    log_q: torch.Tensor
    """ln q of it."""


@dataclass(slots=True)
class SequenceFigures:
    """What one sequence gave."""

    rows: int
    sums: ElementSums
    positions: PositionFigures | None
    """None where outputs are no logits."""


def sequence_figures(
    reference: torch.Tensor, candidate: torch.Tensor, distribution: bool, labels: torch.Tensor | None = None
) -> SequenceFigures:
    """Compare two outputs [rows, width] of any floating dtypes, on the candidate's device.

    distribution: they are logits over classes. labels: the class of the next token of each row, int64 [rows]; -100 for none.
    """
    count, width = candidate.shape
    if not distribution:
        return SequenceFigures(count, element_sums(reference, candidate), None)
    reference, candidate, device = reference.detach(), candidate.detach(), candidate.device
    # One tensor for each result of all positions: small ones kept from every chunk would lie between the chunks' freed
    # temporaries and keep the allocator from using those again, gigabytes of them for a large vocabulary.
    same_top = torch.zeros(count, dtype=torch.bool)
    kl, log_p, log_q = (torch.zeros(count, dtype=torch.float64) for _ in range(3))

    def sums_of(rows: slice, buffers: Sequence[torch.Tensor]) -> ElementSums:
        r, other, delta = buffers  # three only, so that they stay in a cache
        widen(reference[rows], r)
        widen(candidate[rows], other)
        torch.sub(other, r, out=delta)
        index = None if labels is None else labels[rows, None].to(device).clamp(min=0)
        of_c = _softmax(other, index, other)
        of_r = _softmax(r, index, other)
        kl[rows] = _kl_divergence(of_r, of_c, other, delta)
        same_top[rows] = of_r.top == of_c.top
        if of_r.log_probability is not None and of_c.log_probability is not None:
            log_p[rows], log_q[rows] = of_r.log_probability, of_c.log_probability
        return sums_of_small(r, delta) or sums_of_any(r, widen(candidate[rows], other))

    most = _CHUNK_ELEMENTS if device.type == "cpu" else _GPU_CHUNK_ELEMENTS
    sums = sum_chunks(sums_of, candidate, max(1, most // width), 3)
    scored = labels.cpu() >= 0 if labels is not None else torch.zeros(count, dtype=torch.bool)
    return SequenceFigures(count, sums, PositionFigures(kl, same_top, log_p[scored], log_q[scored]))


@dataclass(slots=True)
class _Softmax:
    """What makes probabilities of logits x [rows, classes]: p = e^(x - largest) / total."""

    total: torch.Tensor
    """Σ e^(x - largest), [rows]."""
    largest: torch.Tensor
    """The largest x, [rows]."""
    top: torch.Tensor
    """The first class that has it, [rows]."""
    log_probability: torch.Tensor | None
    """ln p of one class in each row, [rows]."""


def _softmax(x: torch.Tensor, index: torch.Tensor | None, exponentials: torch.Tensor) -> _Softmax:
    """Write e^(x - largest) into a buffer, which may be `x`. index: the class of each row whose ln p is wanted, [rows, 1]."""
    # On the CPU numpy's argmax takes a sixth of the time of torch's.
    top = torch.from_numpy(x.numpy().argmax(-1)) if x.device.type == "cpu" else x.argmax(-1)
    largest = x.gather(1, top[:, None])
    scored = None if index is None else (x.gather(1, index) - largest)[:, 0]
    # e^x is 2^(x log2 e): torch's exp of float64 takes twice as long as its exp2 where MKL has no code for the processor.
    torch.add(largest * -_LOG2_E, x, alpha=_LOG2_E, out=exponentials).exp2_()
    total = exponentials.sum(-1)
    return _Softmax(total, largest[:, 0], top, None if scored is None else scored - total.log())


def _kl_divergence(of_r: _Softmax, of_c: _Softmax, exponentials: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """KL of each row. exponentials: those of r, which are overwritten."""
    log_ratio = (of_c.largest - of_r.largest) + (of_c.total / of_r.total).log()  # ln Σ e^c - ln Σ e^r
    moved = exponentials.mul_(delta).sum(-1)
    if not bool(torch.isfinite(moved).all()):
        # A class that the reference rules out adds nothing: 0 times an infinite Δ is NaN. All other NaN are in log_ratio, too.
        moved = exponentials.nansum(-1)
    return (log_ratio - moved / of_r.total).clamp(min=0)  # rounding may leave a divergence of zero below it
