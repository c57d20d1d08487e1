"""Sums over the elements of the reference's output r and the candidate's output c, for the metrics of Δ = c - r.

If both outputs have the same infinity or NaN at some position, as masked logits do, this counts as no difference. If only one of
the two elements is not finite, the sums of Δ are infinite. All other sums cover only the positions where both elements are finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from dtype_engine.core.number_ranges import Amount, Count
from dtype_engine.runtime.formats.row_blocks import parallel_map, single_intraop_thread

_CHUNK_ELEMENTS = 1 << 16
"""Number of elements of an output that are compared at once, so that their float64 buffers fit in one core's cache."""
_GPU_CHUNK_ELEMENTS = 1 << 22
"""Number of elements of an output that are compared at once on a GPU. Their float64 copies need 100 MB."""


@dataclass(slots=True)
class ElementSums:
    """Sums over elements of the reference's output r and the candidate's output c, all in float64, with Δ = c - r."""

    elements: Count = 0
    nonfinite: Count = 0
    """Number of elements where the candidate is NaN or infinite, and the reference has another value."""
    nonfinite_reference: Count = 0
    """Number of elements that are NaN or plus infinity in the reference. Minus infinity is a mask and is not counted."""
    nonfinite_candidate: Count = 0
    """Number of elements that are NaN or infinite in the candidate, without those that are minus infinity in both."""
    sum_abs: Amount = 0.0
    """Σ|Δ|: the sum of the absolute differences."""
    max_abs: Amount = 0.0
    """max |Δ|: the largest absolute difference."""
    noise: Amount = 0.0
    """ΣΔ²: the sum of the squared differences."""
    energy: Amount = 0.0
    """Σr²: the sum of the reference's squared values."""
    energy_candidate: Amount = 0.0
    """Σc²: the sum of the candidate's squared values."""
    product: float = 0.0
    """Σrc: the sum of the products of reference and candidate."""

    def add(self, other: ElementSums) -> None:
        """Add the sums over further elements."""
        self.elements += other.elements
        self.nonfinite += other.nonfinite
        self.nonfinite_reference += other.nonfinite_reference
        self.nonfinite_candidate += other.nonfinite_candidate
        self.sum_abs += other.sum_abs
        self.max_abs = max(self.max_abs, other.max_abs)
        self.noise += other.noise
        self.energy += other.energy
        self.energy_candidate += other.energy_candidate
        self.product += other.product


def element_sums(reference: torch.Tensor, candidate: torch.Tensor, parallel: bool = False) -> ElementSums:
    """Return the sums over all elements of two outputs of any floating dtypes, computed on the candidate's device. Raises
    ValueError if their shapes differ.

    parallel: whether several threads share the work on the CPU. This is faster only if there are several million elements or more.
    """
    if reference.shape != candidate.shape:
        raise ValueError(f"reference {tuple(reference.shape)} and candidate {tuple(candidate.shape)} differ in shape")
    reference, candidate = reference.detach().reshape(-1), candidate.detach().reshape(-1)
    on_cpu = candidate.device.type == "cpu"

    def sums_of(chunk: slice, buffers: Sequence[torch.Tensor]) -> ElementSums:
        r, c, delta = buffers
        widen(reference[chunk], r)
        widen(candidate[chunk], c)
        return sums_of_small(r, torch.sub(c, r, out=delta)) or sums_of_any(r, c)

    step = _CHUNK_ELEMENTS * (8 if parallel else 1) if on_cpu else _GPU_CHUNK_ELEMENTS
    return sum_chunks(sums_of, candidate, step, 3, parallel)


def sum_chunks(
    sums_of: Callable[[slice, Sequence[torch.Tensor]], ElementSums],
    output: torch.Tensor,
    step: int,
    buffers: int,
    parallel: bool = False,
) -> ElementSums:
    """Call `sums_of` for successive slices of an output, and return the sum of the results, added up in order. step: the number of
    rows in a slice, or of elements if the output is flat.

    `sums_of` also gets `buffers` float64 buffers of the slice's shape on the output's device. The buffers are reused for the next
    slice, because touching new memory takes longer than computing the sums.

    parallel: whether several threads share the work on the CPU. This helps only if a slice takes a millisecond or more, since
    handing over Python's lock at every torch operation takes longer than an operation on a small slice.
    """
    count = len(output)
    step = min(step, count)
    chunks = [ElementSums()] * (-(-count // step) if count else 0)

    def work(numbers: Iterable[int]) -> None:
        shape = (step, *output.shape[1:])
        memory = [torch.empty(shape, dtype=torch.float64, device=output.device) for _ in range(buffers)]
        for number in numbers:
            first, last = number * step, min((number + 1) * step, count)
            chunks[number] = sums_of(slice(first, last), [buffer[: last - first] for buffer in memory])

    if parallel:
        parallel_map(work, len(chunks), output.device)
    else:
        with single_intraop_thread():
            work(range(len(chunks)))
    total = ElementSums()
    for sums in chunks:
        total.add(sums)
    return total


def widen(values: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """Write values into a float64 buffer: float16 first to float32, since torch vectorizes these two steps, but not one alone."""
    return into.copy_(values.float() if values.dtype == torch.float16 else values)


def sums_of_small(r: torch.Tensor, delta: torch.Tensor) -> ElementSums | None:
    """Return the sums over some elements of the outputs in less time than `sums_of_any`. Returns None if Δ is not finite, or so
    large that computing the candidate's sums from r and Δ would lose digits. delta: Δ, which is overwritten. r and delta are
    float64 and contiguous.
    """
    r, delta = r.view(-1), delta.view(-1)
    sums = [torch.dot(delta, delta), torch.dot(r, r), torch.dot(r, delta)]
    absolute = delta.abs_()
    noise, energy, moved, sum_abs, max_abs = torch.stack([*sums, absolute.sum(), absolute.amax()]).tolist()
    if not (math.isfinite(noise) and noise <= energy / 4):
        return None
    # With c = r + Δ: Σc² = Σr² + 2 Σ rΔ + ΣΔ², and Σ rc = Σr² + Σ rΔ.
    return ElementSums(len(r), 0, 0, 0, sum_abs, max_abs, noise, energy, energy + 2 * moved + noise, energy + moved)


def sums_of_any(r: torch.Tensor, c: torch.Tensor) -> ElementSums:
    """Return the sums over some float64 elements r and c of the outputs, which may differ by any amount, be infinite or NaN."""
    r, c = r.view(-1), c.view(-1)
    finite = torch.isfinite(r) & torch.isfinite(c)
    same = (r == c) | (torch.isnan(r) & torch.isnan(c))
    r_finite, c_finite = torch.where(finite, r, 0.0), torch.where(finite, c, 0.0)
    delta = c_finite - r_finite
    lost = math.inf if bool((~finite & ~same).any()) else 0.0
    return ElementSums(
        elements=len(r),
        nonfinite=int((~torch.isfinite(c) & ~same).sum()),
        nonfinite_reference=int((torch.isnan(r) | torch.isposinf(r)).sum()),
        nonfinite_candidate=int((~torch.isfinite(c) & ~(same & torch.isneginf(c))).sum()),
        sum_abs=float(delta.abs().sum()) + lost,
        max_abs=float(delta.abs().amax()) + lost,
        noise=float(torch.dot(delta, delta)) + lost,
        energy=float(torch.dot(r_finite, r_finite)),
        energy_candidate=float(torch.dot(c_finite, c_finite)),
        product=float(torch.dot(r_finite, c_finite)),
    )
