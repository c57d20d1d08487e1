"""Compares which inputs are nearest to each other by the reference's vectors and by the candidate's.

The recall at 10 of an input is the share of its ten nearest other inputs, by cosine under the candidate, that are also among its
ten nearest under the reference. An input as similar as the tenth, within `_TIE`, counts as one of the ten, since float32
arithmetic does not tell the two apart (ann-benchmarks counts ties in the same way).
"""

from __future__ import annotations

import math

import torch

NEAREST = 10
FEWEST = NEAREST + 2
"""With fewer inputs, all other inputs are among the ten nearest, whatever the vectors are."""
MOST = 4096
"""How many vectors are compared with each other. Their cosines are computed in one block of rows after another."""
_TIE = 1e-6
_BLOCK = 256


def recall(reference: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    """Return the recall at 10 of each input, float64 [inputs], from 0 to 1. It is NaN everywhere if a vector is not finite.

    reference, candidate: the vectors of the same inputs, [inputs, width] on the CPU, of `FEWEST` inputs or more.
    """
    sides = [_units(each) for each in (reference, candidate)]
    if not all(bool(each.isfinite().all()) for each in sides):
        return torch.full((len(reference),), math.nan, dtype=torch.float64)
    found = []
    for first in range(0, len(reference), _BLOCK):
        of_reference, of_candidate = (_cosines(each, first) for each in sides)
        tenth = of_reference.topk(NEAREST, dim=1).values[:, -1:]
        nearest = of_candidate.topk(NEAREST, dim=1).indices
        found.append((of_reference.gather(1, nearest) >= tenth - _TIE).double().mean(1))
    return torch.cat(found)


def by_chance(inputs: int) -> float:
    """Return the recall at 10 that is expected if the candidate ordered the other inputs at random."""
    return NEAREST / (inputs - 1)


def _units(vectors: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(vectors.double(), dim=1)


def _cosines(units: torch.Tensor, first: int) -> torch.Tensor:
    """Return the cosines of a block of rows with all rows. An input is no neighbor of its own."""
    block = units[first : first + _BLOCK] @ units.T
    rows = torch.arange(len(block))
    block[rows, first + rows] = -math.inf
    return block
