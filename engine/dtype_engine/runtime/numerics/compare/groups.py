"""Computes the drift in groups of positions. `results/groups.py` has the table of the groups.

With n positions in a group and the divergence k at each: the mean is Σ k / n, and its standard error s / √n with the deviation
s = √(Σ (k - mean)² / (n - 1)).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from dtype_engine.results.groups import GROUPINGS, Grouping, Groups, PositionGroup
from dtype_engine.runtime.numerics.compare.sequence_figures import PositionFigures


def positions_in_sequences(shape: Sequence[int], kept: torch.Tensor | None) -> torch.Tensor:
    """Return the position of each row of an output in its sequence, counted from 1: int64 [rows], on the CPU.

    shape: (batch, positions) of the output. kept: a mask of the positions that are compared, bool [batch, positions], or None for
    all. The others are padding, and do not count.
    """
    if kept is None:
        return torch.arange(1, shape[1] + 1).repeat(shape[0])
    kept = kept.cpu()
    return kept.long().cumsum(1)[kept]


def grouped(sequences: Sequence[PositionFigures]) -> Groups:
    """Return the drift in each group that has positions. A grouping is left out if a sequence lacks its values."""
    kl = torch.cat([each.kl for each in sequences])
    same = torch.cat([each.same_top for each in sequences]).double()
    found = {}
    for name, grouping in GROUPINGS.items():
        values = [getattr(each, name) for each in sequences]
        if not any(each is None for each in values):
            found[name] = _groups(grouping, torch.cat(values), kl, same)
    return found


def _groups(grouping: Grouping, values: torch.Tensor, kl: torch.Tensor, same: torch.Tensor) -> dict[str, PositionGroup]:
    """Return the groups of a grouping by name. values: that of each position. kl, same: as in `PositionFigures`, all float64."""
    lowest = torch.tensor([low for low, _ in grouping.ranges], dtype=torch.float64)
    numbers = (torch.bucketize(values.double(), lowest, right=True) - 1).clamp(min=0)
    count = torch.bincount(numbers)
    sums, agreeing = (torch.bincount(numbers, weights=each) for each in (kl, same))
    squares = torch.bincount(numbers, weights=(kl - (sums / count)[numbers]).square())
    total = float(sums.sum())
    return {
        grouping.names[number]: PositionGroup(
            positions=n,
            kl_mean=summed / n,
            kl_mean_se=math.sqrt(square / (n - 1) / n) if n > 1 else None,
            kl_share=summed / total if total else None,
            top1_agreement=agreed / n,
        )
        for number, (n, summed, square, agreed) in enumerate(
            zip(*(each.tolist() for each in (count, sums, squares, agreeing)), strict=True)
        )
        if n
    }
