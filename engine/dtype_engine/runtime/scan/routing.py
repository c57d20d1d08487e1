"""Estimates the drift from tokens that a router sends to other experts after a cast. A second-order estimate does not include this
drift.

A router selects the k largest of its scores, and a weight's rounding error changes these scores slightly. If the k-th and the next
score are close, they may swap. The token then goes through a different expert, and the output jumps. In a mixture of experts, most
of the drift from small errors comes from such swaps.

The estimate covers every `topk` call whose scores have a gradient. A few calls are sampled per sequence, and two quantities are
estimated for each sampled call:

- The standard deviation σ of the change that a weight's error causes in the margins (the k-th score minus the next). As with the
  probes of the output, a gradient of random signs at the margins is propagated back; with the gradients g and local errors Δ at the
  weight's operations, (Σ g·Δ)² is then a sample of the sum of the squared changes.
- The drift that one swap costs. The reference runs again with the k-th and the next choice swapped for the tokens with the
  smallest margins.

A token with margin m then swaps with probability Φ(-m/σ). Which tokens swap is random, and this adds to the standard error. If most
likely no token swaps (the expected number of swaps is below ln 2), no drift is added; otherwise, the expected drift is added.

This derivation is our own; we know of no publication that has it. Tests compare it with random changes of the margins and with
measurements (tests/engine/runtime/scan/test_routing.py).

Shapes: margins [tokens], with all sequences and positions flattened; swap probabilities [dtypes of all weights, tokens].
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dtype_engine.runtime.model.weight import Weight
from dtype_engine.runtime.modes.op_tables import Arguments
from dtype_engine.runtime.modes.reference import ReferenceMode

Key = tuple[str, str]
SAMPLED_CALLS = 16
"""For how many calls of routers, counted over all sequences, the drift from rerouted tokens is estimated."""
_SWAPPED = 8
"""To measure what one swap costs, the k-th and the next expert are swapped for 1 / `_SWAPPED` of all tokens."""


@dataclass(slots=True)
class TopKCall:
    """A call of `torch.topk` in a pass, with which a router chooses experts."""

    index: int
    """The index among all `topk` calls of the pass."""
    margins: torch.Tensor
    """The k-th score minus the next score of each token: [tokens], with an autograd graph."""


@dataclass
class TopKSample:
    """What was found for one sampled `topk` call in one sequence."""

    index: int
    share: float
    """For how many of the sequence's `topk` calls this sample stands: all calls, divided by the sampled ones."""
    margins: list[float]
    cost: float = 0.0
    """The drift caused by swapping the k-th and the next expert of one token, summed over all positions of the sequence."""
    squares: dict[Key, float] = field(default_factory=dict)
    """For each (weight, dtype): a random estimate of the sum over all tokens of (change of the margin)² after this cast."""
    independent: dict[Key, float] = field(default_factory=dict)
    """What `squares` would be on average if the errors in an operation's output were independent."""


def sample_calls(calls: Sequence[TopKCall], sequence: int, sequences: int) -> list[TopKCall]:
    """Return those of `calls` that are sampled in the sequence with the index `sequence`. Different sequences sample different
    calls, to cover all. sequences: the number of all sequences.
    """
    count = len(calls)
    if not count:
        return []
    most = min(count, math.ceil(SAMPLED_CALLS / max(1, sequences)))
    # A step that is coprime to the count visits every index, and this size spreads consecutive samples over the model's depth.
    step = next(step for step in range(max(1, round(0.62 * count)), count + 1) if math.gcd(step, count) == 1)
    return [calls[(sequence * most + turn) * step % count] for turn in range(most)]


def record_topk(index: int, args: Arguments, kwargs: Mapping[str, Any]) -> TopKCall | None:
    """Return a record of a pass's `topk` call number `index`, or None if it selects all scores or no weight influences them."""
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
    """Runs the reference, but swaps the k-th and the next choice of one `topk` call for the tokens in the mask `rows`."""

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
    """Return a mask, bool [tokens], that is True for `1 / _SWAPPED` of the tokens, those with the smallest margins."""
    rows = torch.zeros(margins.shape, dtype=torch.bool, device=margins.device)
    finite = torch.where(torch.isfinite(margins), margins, math.inf)
    rows[finite.argsort()[: max(1, len(margins) // _SWAPPED)]] = True
    return rows & torch.isfinite(margins)


def rerouting_drift(samples: Sequence[TopKSample]) -> dict[Key, tuple[float, float]]:
    """Return (the expected drift from rerouted tokens, its variance) by (weight, dtype), summed over the sequences."""
    squares: dict[Key, float] = {}
    independent: dict[Key, float] = {}
    costs: dict[int, list[float]] = {}
    for sample in samples:
        costs.setdefault(sample.index, []).append(sample.cost)
        for key, value in sample.squares.items():
            squares[key] = squares.get(key, 0.0) + value
            independent[key] = independent.get(key, 0.0) + sample.independent[key]
    # The ratio of correlated to independent errors of a weight is nearly the same in all dtypes: see `scores`.
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
