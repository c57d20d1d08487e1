"""Computes the sums over the elements of a module's outputs from which the module's drift is computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from dtype_engine.core.number_ranges import Count
from dtype_engine.results.drift import ModuleDrift
from dtype_engine.runtime.device import for_sums
from dtype_engine.runtime.numerics.compare.element_sums import ElementSums, sum_chunks, sums_of_any, widen
from dtype_engine.runtime.numerics.compare.metrics import sqnr_db

_CHUNK_ELEMENTS = 1 << 17
"""How many output elements are summed in one step. Two float64 copies of them fit in the cache of one core."""
_GPU_CHUNK_ELEMENTS = 1 << 22
"""How many output elements are summed in one step on a GPU. Two float64 copies of them need 67 MB."""
_NARROW = frozenset({torch.float32, torch.bfloat16, torch.float16})
_ROW_ELEMENTS = 256
"""How many squares are added in float32 on an accelerator, before their sum is added in float64."""


@dataclass(slots=True)
class ModuleSums:
    """Sums over the elements of a module's outputs in one or more calls."""

    sums: ElementSums = field(default_factory=ElementSums)
    comparable: bool = True
    """Whether the outputs could be compared: shapes are equal, and each row of an expert belongs to the same token."""
    rerouted: Count = 0
    """For a router that chose other experts for at least one token: the number of all tokens in that call. Otherwise 0."""

    def add(self, other: ModuleSums) -> None:
        """Add the sums of other calls of the same module."""
        self.sums.add(other.sums)
        self.comparable = self.comparable and other.comparable
        self.rerouted = self.rerouted or other.rerouted

    def drift(self, name: str) -> ModuleDrift:
        """Return the drift of the module `name`. Its SQNR is None if outputs can't be compared or no reference value is finite."""
        sums = self.sums
        compared = self.comparable and not (sums.nonfinite_reference and not sums.energy)
        figure = sqnr_db(sums.energy, sums.noise) if compared else None
        return ModuleDrift(name, figure, sums.max_abs, sums.nonfinite, sums.nonfinite_reference)

    @classmethod
    def not_comparable(cls, reference: torch.Tensor, candidate: torch.Tensor) -> ModuleSums:
        """Return sums for outputs that can't be compared. They only hold how many values of the reference's output are NaN or
        +infinity, and how many more non-finite values the candidate's output has.
        """
        counts = [int((~torch.isfinite(output)).sum()) for output in (reference, candidate)]
        itself = int((torch.isnan(reference) | torch.isposinf(reference)).sum())
        sums = ElementSums(nonfinite=max(0, counts[1] - counts[0]), nonfinite_reference=itself)
        return cls(sums, comparable=False)


def compare_outputs(reference: torch.Tensor, candidate: torch.Tensor, kept: torch.Tensor | None = None) -> ModuleSums:
    """Return the sums over all elements of two outputs of a module, in float64. Sums that only the main output's metrics need are
    left out, since they would double the time. kept: the positions to compare, a bool mask of the output's first dimensions; if
    None, all.
    """
    if reference.shape != candidate.shape:
        return ModuleSums.not_comparable(reference, candidate)
    if kept is not None:
        reference, candidate = reference[kept], candidate[kept]
    reference, candidate = (for_sums(output.detach()).reshape(-1) for output in (reference, candidate))

    if candidate.device.type != "cpu" and {reference.dtype, candidate.dtype} <= _NARROW:
        return ModuleSums(_sums_on_accelerator(reference, candidate))

    def sums_of(chunk: slice, buffers: Sequence[torch.Tensor]) -> ElementSums:
        r, delta = buffers
        widen(reference[chunk], r)
        widen(candidate[chunk], delta).sub_(r)
        sums = [torch.dot(delta, delta), torch.dot(r, r), delta.abs_().amax()]
        noise, energy, max_abs = torch.stack(sums).tolist()
        if not math.isfinite(noise):
            return sums_of_any(r, widen(candidate[chunk], delta))
        return ElementSums(len(r), max_abs=max_abs, noise=noise, energy=energy)

    step = _CHUNK_ELEMENTS if candidate.device.type == "cpu" else _GPU_CHUNK_ELEMENTS
    return ModuleSums(sum_chunks(sums_of, candidate, step, 2))


def _sums_on_accelerator(reference: torch.Tensor, candidate: torch.Tensor) -> ElementSums:
    """Return the sums over two flat outputs, whose elements have at most 32 bits. Differences are rounded to float32, each row of
    `_ROW_ELEMENTS` elements is summed in float32, and these sums are added in float64. This needs a quarter of the memory traffic
    of float64 copies, and memory traffic limits the speed. The relative error of a sum is about 1e-7.
    """
    if not len(reference):
        return ElementSums()
    r = reference.float()
    delta = candidate - r
    largest = torch.linalg.vector_norm(delta, torch.inf).double()
    noise, energy, max_abs = torch.stack([_energy(delta), _energy(r), largest]).tolist()
    if not math.isfinite(noise + energy) or (noise < 1e-30 and max_abs):  # the squares may leave the range of float32
        return sums_of_any(r.double(), candidate.double())
    return ElementSums(len(r), max_abs=max_abs, noise=noise, energy=energy)


def _energy(values: torch.Tensor) -> torch.Tensor:
    whole = len(values) // _ROW_ELEMENTS * _ROW_ELEMENTS
    rows, rest = values[:whole].view(-1, _ROW_ELEMENTS), values[whole:].double()
    norms: torch.Tensor = torch.linalg.vector_norm(rows, dim=-1)
    return norms.double().square().sum() + rest.square().sum()
