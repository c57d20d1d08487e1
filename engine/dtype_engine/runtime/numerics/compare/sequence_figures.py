"""Compares two outputs for one sequence: sums and divergences of a reference's output r and a candidate's output c. Logits have the
shape [positions, classes].

With p = softmax(r), q = softmax(c) and Δ = c - r, the divergence at a position in nats is

    KL = Σ p (ln p - ln q) = ln Σ e^c - ln Σ e^r - Σ p Δ,    where 0 ln 0 = 0.

The acceptance is Σ min(p, q) = 1 - ½ Σ |p - q|: the probability that speculative sampling from p accepts a token that was drawn
from q (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023, corollary 3.6).

Everything is computed in float64, whatever the dtypes of the outputs, some rows at a time. The outputs are never copied as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dtype_engine.runtime.device import for_sums
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
"""Number of logits that are compared at once. Their float64 buffers (4 MB) fit in a cache that cores share."""
_GPU_CHUNK_ELEMENTS = 1 << 22
"""Number of logits that are compared at once on a GPU, where their float64 buffers need 100 MB, or 134 MB with the acceptance."""
_RESULTS = 9
"""Number of float64 values that are stored for each position until all positions have been compared."""


@dataclass(slots=True)
class PositionFigures:
    """Metrics at each position of one sequence, on the CPU. The tensors are float64 [positions], unless stated otherwise."""

    kl: torch.Tensor
    """The KL divergence in nats. It is NaN at positions where the reference has NaN or plus infinity."""
    same_top: torch.Tensor
    """Whether the class with the largest logit, the first of equal ones, is the same in both outputs: bool [positions]."""
    log_p: torch.Tensor
    """The reference's log-probability of the correct next token, at the positions that have one: float64 [scored positions]."""
    log_q: torch.Tensor
    """The candidate's log-probability of the correct next token, at the same positions."""
    confidence: torch.Tensor | None = None
    """The largest probability that the reference gives to a class, from 0 to 1. None if an earlier version saved the figures."""
    position: torch.Tensor | None = None
    """The position in its sequence, from 1 and without padding: int64 [positions]. None if the positions are not in sequences."""
    accepted: torch.Tensor | None = None
    """Σ min(p, q), from 0 to 1, or None if it was not asked for. It is NaN at positions where an output has NaN or plus infinity.
    """


@dataclass(slots=True)
class SequenceFigures:
    """The comparison of the candidate's output with the reference's for one sequence."""

    rows: int
    sums: ElementSums
    positions: PositionFigures | None
    """The metrics at each position, or None if the outputs are not logits."""
    left_out: int = 0
    """Number of positions that were not compared because a mask marks them as padding."""
    vectors: tuple[torch.Tensor, torch.Tensor] | None = None
    """The vectors of the inputs by the reference and by the candidate, float32 [inputs, width] on the CPU, if their neighbors are
    compared.
    """


def sequence_figures(
    reference: torch.Tensor,
    candidate: torch.Tensor,
    distribution: bool,
    labels: torch.Tensor | None = None,
    acceptance: bool = False,
) -> SequenceFigures:
    """Compare two outputs [rows, width] of any floating dtypes, on the candidate's device, or on the CPU if this device does not
    support float64. distribution: whether the outputs are logits over classes. labels: the id of the correct next token for each
    row, int64 [rows], or -100 for none. acceptance: whether to compute Σ min(p, q) of logits, for about 15 % more time.
    """
    reference, candidate = for_sums(reference), for_sums(candidate)
    count, width = candidate.shape
    if not distribution:
        return SequenceFigures(count, element_sums(reference, candidate), None)
    reference, candidate, device = reference.detach(), candidate.detach(), candidate.device
    # All results are in one tensor. Small tensors kept from every chunk would lie between the chunks' freed temporaries,
    # so that the allocator could not reuse their memory: gigabytes for a large vocabulary.
    results = torch.zeros(_RESULTS + acceptance, count, dtype=torch.float64, device=device)
    index = torch.zeros(count, 1, dtype=torch.int64) if labels is None else labels[:, None].clamp(min=0)
    index = index.to(device)

    def sums_of(rows: slice, buffers: Sequence[torch.Tensor]) -> ElementSums:
        r, other, delta, *more = buffers  # as few as possible, so that they stay in a cache
        widen(reference[rows], r)
        widen(candidate[rows], other)
        torch.sub(other, r, out=delta)
        scored = index[rows]
        of_c = _softmax(other, scored, more[0] if more else other)
        of_r = _softmax(r, scored, other)
        accepted = [_overlap(other, of_r[0], each, of_c[0]) for each in more]
        moved = other.mul_(delta).sum(-1)
        sums = sums_of_small(r, delta)
        if sums is None:
            # A class that the reference rules out adds nothing to Σ p Δ, but 0 times an infinite Δ is NaN.
            _softmax(r, scored, other)
            moved = other.mul_(widen(candidate[rows], delta).sub_(r)).nansum(-1)
            sums = sums_of_any(r, widen(candidate[rows], other))
        results[:, rows] = torch.stack([*of_r, *of_c, moved, *accepted])
        return sums

    most = _CHUNK_ELEMENTS if device.type == "cpu" else _GPU_CHUNK_ELEMENTS
    sums = sum_chunks(sums_of, candidate, max(1, most // width), 3 + acceptance, parallel=True)
    total_r, largest_r, top_r, scored_r, total_c, largest_c, top_c, scored_c, moved, *accepted = results.cpu()
    # A NaN only in Σ p Δ was removed above; any other NaN is also in ln Σ e^c - ln Σ e^r.
    kl = (largest_c - largest_r) + (total_c / total_r).log() - moved / total_r
    scored = labels.cpu() >= 0 if labels is not None else torch.zeros(count, dtype=torch.bool)
    log_p, log_q = scored_r - total_r.log(), scored_c - total_c.log()
    # Rounding can make a divergence of zero negative. The largest probability of the reference is e^0 / Σ e^(r - m).
    at = PositionFigures(kl.clamp(min=0), top_r == top_c, log_p[scored], log_q[scored], total_r.reciprocal())
    at.accepted = next(iter(accepted), None)
    return SequenceFigures(count, sums, at)


def _softmax(x: torch.Tensor, scored: torch.Tensor, exponentials: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Write e^(x - m) into the buffer `exponentials`, which may be `x` itself. x: logits [rows, classes]. m is the largest logit of
    each row. scored: the index of one class in each row, [rows, 1]. Returns four tensors [rows]: Σ e^(x - m); m; the index of the
    first class whose logit is m; and x - m of the class in `scored`.
    """
    # On the CPU numpy's argmax takes a sixth of the time of torch's.
    top = torch.from_numpy(x.numpy().argmax(-1)) if x.device.type == "cpu" else x.argmax(-1)
    largest = x.gather(1, top[:, None])
    distance = x.gather(1, scored) - largest
    # e^x is 2^(x log2 e): torch's exp of float64 takes twice as long as its exp2 where MKL has no code for the processor.
    torch.add(largest * -_LOG2_E, x, alpha=_LOG2_E, out=exponentials).exp2_()
    return exponentials.sum(-1), largest[:, 0], top.double(), distance[:, 0]


def _overlap(of_r: torch.Tensor, total_r: torch.Tensor, of_c: torch.Tensor, total_c: torch.Tensor) -> torch.Tensor:
    """Return Σ min(p, q) of each row. of_r, of_c: e^(r - m) and e^(c - m), [rows, classes]; of_c is overwritten. total_r, total_c:
    the sums of their rows.
    """
    of_c.mul_((total_r / total_c)[:, None])  # now in the unit of of_r, so that equal rows give exactly 1
    return (torch.minimum(of_r, of_c, out=of_c).sum(-1) / total_r).clamp_(max=1)
