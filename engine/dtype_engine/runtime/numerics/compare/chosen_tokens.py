"""Compares the tokens that a reference and a candidate choose: the most likely ones by their logits."""

from __future__ import annotations

from typing import NamedTuple

import torch

NO_TOKEN = -1
"""The id of the candidate's token where its logits have NaN."""


class ChosenTokens(NamedTuple):
    """The candidate's choice at each position. Both tensors are on the CPU."""

    ids: torch.Tensor
    """The most likely token, int64 [positions], or `NO_TOKEN`."""
    severities: torch.Tensor
    """As of `severities`, and infinity where there is no token."""


def chosen_tokens(reference: torch.Tensor, candidate: torch.Tensor) -> ChosenTokens:
    """Return which tokens a candidate chooses, and how much less likely they are to the reference than its own choice. reference,
    candidate: float logits [positions, classes].
    """
    ids = candidate.argmax(-1).cpu()
    found = severities(reference, ids)
    lost = candidate.isnan().any(-1).cpu()
    return ChosenTokens(ids.masked_fill(lost, NO_TOKEN), found.masked_fill(lost, torch.inf))


def severities(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of the most likely token at each position minus that of the token in `ids`: in nats, float64
    [positions], on the CPU. Infinity for a token whose logit is minus infinity. logits: [positions, classes], without NaN. ids:
    int64 [positions].

    ln Σ e^r cancels in ln p(a) - ln p(b) = r_a - r_b, so no softmax is computed.
    """
    largest, chosen = logits.amax(-1), logits.gather(-1, ids[:, None].to(logits.device))[:, 0]
    # Where both are infinite, their difference is NaN.
    return (largest.cpu().double() - chosen.cpu().double()).masked_fill((largest == chosen).cpu(), 0.0)
