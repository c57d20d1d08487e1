"""What a second-order estimate can't see: tokens that are sent to another expert.

A router takes the k best of its scores, and a weight's error in a narrow dtype moves these a little. Where the k-th and the
one after it are near each other they change places, the token goes through another expert, and the output jumps. In a
mixture of experts that is most of the drift of small errors.

It is estimated generically, for every `topk` of a pass over values that have a gradient. Two things are asked of a few of them
per sequence. The margins between the k-th score and the next are carried back with random signs, as the output's probes
are: (Σ g·Δ)² is a sample of the sum of squares of what a weight's error adds to the margins, and so gives its standard deviation
σ. And the reference runs once more with the k-th and the next exchanged for the tokens of the least margins: what that costs in
drift a token. A token of margin m then flips with probability Φ(-m/σ). Which tokens do is chance, and the error bar says so:
where most likely none does (less than ln 2 are expected) none is counted, else as many as are expected.

This derivation is our own; we know of no publication that has it. It was checked against drawing the changes of the margins at
random, and against measuring every weight of mixtures of experts alone (tests/engine/runtime/scan/test_routing.py).

Shapes: margins [tokens], those of all sequences and positions in a row; flips [dtypes of all weights, tokens].
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dtype_engine.runtime.model.live import Weight
from dtype_engine.runtime.modes.op_tables import Arguments
from dtype_engine.runtime.modes.reference import ReferenceMode

Key = tuple[str, str]
SAMPLED_CALLS = 16
"""How many calls are sampled, over all sequences."""
_SWAPPED = 8
"""One in so many tokens, those of the least margins, is exchanged to see what that costs."""


@dataclass(slots=True)
class TopKCall:
    """A call of `topk` in a pass: its index among all, and its margins [tokens], the k-th score less the next, with a graph."""

    index: int
    margins: torch.Tensor


@dataclass
class TopKSample:
    """What one call of `topk` gave in one sequence. `share`: 1 / share of the sequence's calls were sampled.

    margins: a token each. cost: drift of one exchanged token, summed over the sequence's positions. squares: by weight and
    dtype, a sample of the sum of squares of the changes of the margins; independent: its mean if the errors of an operation's
    output elements were independent.
    """

    index: int
    share: float
    margins: list[float]
    cost: float = 0.0
    squares: dict[Key, float] = field(default_factory=dict)
    independent: dict[Key, float] = field(default_factory=dict)


def sample_calls(calls: Sequence[TopKCall], sequence: int, sequences: int) -> list[TopKCall]:
    """The calls that are sampled in a sequence: others in the next, so that all have their turn."""
    count = len(calls)
    if not count:
        return []
    most = min(count, math.ceil(SAMPLED_CALLS / max(1, sequences)))
    # A step that has no divisor in common with the count comes by every index, spread over the depth.
    step = next(step for step in range(max(1, round(0.62 * count)), count + 1) if math.gcd(step, count) == 1)
    return [calls[(sequence * most + turn) * step % count] for turn in range(most)]


def record_topk(index: int, args: Arguments, kwargs: Mapping[str, Any]) -> TopKCall | None:
    """A call of `topk` with its margins; None for one that takes all, or has nothing to do with any weight."""
    arguments = _topk_arguments(args, kwargs)
    if arguments is None or not arguments[0].requires_grad:
        return None
    scores, k = arguments
    best = scores.topk(k + 1, dim=-1).values
    return TopKCall(index, (best[..., k - 1] - best[..., k]).reshape(-1))


def _topk_arguments(args: Arguments, kwargs: Mapping[str, Any]) -> tuple[torch.Tensor, int] | None:
    given = dict(zip(("input", "k", "dim", "largest"), args, strict=False)) | dict(kwargs)
    scores, k, dim = given.get("input"), given.get("k"), given.get("dim", -1)
    if not isinstance(scores, torch.Tensor) or not scores.is_floating_point() or not isinstance(k, int):
        return None
    if not given.get("largest", True) or dim not in (-1, scores.ndim - 1) or not 0 < k < scores.shape[-1]:
        return None
    return scores, k


class SwapTopKMode(ReferenceMode):
    """The reference, with the k-th and the next of one selection exchanged for some tokens.

    index: which `topk` of the pass. rows: of which tokens, bool, flat.
    """

    def __init__(self, weights: Mapping[int, Weight], device: torch.device, index: int, rows: torch.Tensor) -> None:
        super().__init__(weights, device)
        self.index = index
        self.rows = rows
        self._seen = 0

    def run(self, func: Any, name: str, args: Arguments, kwargs: dict[str, Any]) -> Any:
        output = super().run(func, name, args, kwargs)
        if name != "topk":
            return output
        self._seen += 1
        arguments = _topk_arguments(args, kwargs)
        if self._seen - 1 != self.index or arguments is None:
            return output
        scores, k = arguments
        best = scores.topk(k + 1, dim=-1)
        rows = self.rows.reshape(scores.shape[:-1])[..., None]
        last = torch.arange(k, device=scores.device) == k - 1
        swapped = [torch.where(rows & last, part[..., k:], part[..., :k]) for part in (best.values, best.indices)]
        return torch.return_types.topk((swapped[0], swapped[1]))


def tokens_to_swap(margins: torch.Tensor) -> torch.Tensor:
    """The tokens of the least margins, bool."""
    rows = torch.zeros(margins.shape, dtype=torch.bool, device=margins.device)
    finite = torch.where(torch.isfinite(margins), margins, math.inf)
    rows[finite.argsort()[: max(1, len(margins) // _SWAPPED)]] = True
    return rows & torch.isfinite(margins)


def rerouting_drift(samples: Sequence[TopKSample]) -> dict[Key, tuple[float, float]]:
    """By weight and dtype: the drift that tokens sent elsewhere most likely add, summed over the sequences of the samples, and
    its variance: whether a token flips is chance.
    """
    squares: dict[Key, float] = {}
    independent: dict[Key, float] = {}
    costs: dict[int, list[float]] = {}
    for sample in samples:
        costs.setdefault(sample.index, []).append(sample.cost)
        for key, value in sample.squares.items():
            squares[key] = squares.get(key, 0.0) + value
            independent[key] = independent.get(key, 0.0) + sample.independent[key]
    # How much the errors of one weight reinforce each other is nearly the same in all dtypes: see `scores`.
    ratios: dict[str, list[float]] = {}
    for key, value in independent.items():
        if 0 < value < math.inf and math.isfinite(squares[key]):
            ratios.setdefault(key[0], []).append(squares[key] / value)
    totals: dict[Key, tuple[float, float, float]] = {}
    for sample in samples:
        cost = statistics.fmean(costs[sample.index])
        margins = torch.tensor(sample.margins, dtype=torch.float64).clamp(min=0)
        margins = margins[torch.isfinite(margins)]
        keys = [key for key, value in sample.independent.items() if key[0] in ratios and 0 < value < math.inf]
        if not keys or not len(margins):
            continue
        sigma = torch.tensor(
            [math.sqrt(statistics.fmean(ratios[key[0]]) * sample.independent[key] / len(margins)) for key in keys],
            dtype=torch.float64,
        ).clamp(min=1e-300)
        flips = torch.special.erfc(margins / (sigma[:, None] * math.sqrt(2))).sum(1) / 2
        for key, count in zip(keys, flips.tolist(), strict=True):
            mean, variance, flipped = totals.get(key, (0.0, 0.0, 0.0))
            totals[key] = (
                mean + sample.share * cost * count,
                variance + sample.share * cost * cost * count,
                flipped + sample.share * count,
            )
    return {
        key: (mean if flipped >= math.log(2) else 0.0, variance) for key, (mean, variance, flipped) in totals.items()
    }
