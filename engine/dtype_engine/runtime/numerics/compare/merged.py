"""Compares two outputs of which one is known for some classes alone, by merging all others into one class.

Merging classes never makes a divergence larger: Σ p ln(p / q) >= (Σ p) ln(Σ p / Σ q) over the merged ones (the log-sum inequality).
So the KL divergence of the merged distributions is a lower bound of that of the whole ones. Σ min(p, q) never gets smaller, so it
would be an upper bound. It is left out, since a limit is on how small it may be.
"""

from __future__ import annotations

import math

import torch

from dtype_engine.runtime.numerics.compare.sequence_figures import PositionFigures, SequenceFigures, sequence_figures

_CHUNK_ELEMENTS = 1 << 22
_ROUNDING = 2.0**-20
"""A probability of the other classes below this can't be told from the rounding of float32 values. It is then taken to be, in this
range, what makes the divergence least: p ln(p / q) is least where p = q / e, and falls with q.
"""


def merged_figures(
    known: torch.Tensor,
    ids: torch.Tensor | None,
    logits: torch.Tensor,
    next_tokens: torch.Tensor | None,
    known_is: str,
) -> SequenceFigures:
    """Return the figures of a sequence: the KL is a lower bound, the others are those of the whole distributions. The positions in
    the sequence are left to the caller.

    known: log-probabilities of some classes, among them the likeliest, in any floating dtype [positions, k], with -infinity for
    none. ids: these classes, int64 [positions, k], or None if they are all classes in their order. logits: those of all classes in
    the other output, [positions, classes]. next_tokens: the correct class at each position, int64 [positions], or -100 for none.
    One that is not known counts as none. known_is: "reference" or "candidate".
    """
    step = max(1, _CHUNK_ELEMENTS // logits.shape[1])
    parts = []
    for rows in (slice(start, start + step) for start in range(0, len(logits), step)):
        labels = None if next_tokens is None else next_tokens[rows].cpu()
        of_rows = None if ids is None else ids[rows]
        parts.append(_figures(known[rows].double(), of_rows, logits[rows].cpu().double(), labels, known_is))
    whole = parts[0]
    for part in parts[1:]:
        whole.rows += part.rows
        whole.sums.add(part.sums)
    found = [part.positions for part in parts if part.positions is not None]
    names = [name for name in PositionFigures.__dataclass_fields__ if getattr(found[0], name) is not None]
    whole.positions = PositionFigures(**{name: torch.cat([getattr(each, name) for each in found]) for name in names})
    return whole


def _figures(
    known: torch.Tensor, ids: torch.Tensor | None, logits: torch.Tensor, labels: torch.Tensor | None, known_is: str
) -> SequenceFigures:
    none, likeliest = known.isneginf(), known.argmax(-1)
    found = None
    if ids is None:
        these, others = logits.masked_fill(none, -torch.inf), logits.masked_fill(~none, -torch.inf)
        if labels is not None:
            is_known = ~none.gather(1, labels.clamp(min=0)[:, None])[:, 0]
            found = labels.where(is_known, -100)
    else:
        these, others = logits.gather(1, ids).masked_fill(none, -torch.inf), logits.scatter(1, ids, -torch.inf)
        likeliest = ids.gather(1, likeliest[:, None])[:, 0]
        if labels is not None:
            matches = (ids == labels[:, None]) & ~none
            found = matches.int().argmax(1).where(matches.any(1), -100)
    other = others.logsumexp(-1, keepdim=True)
    whole = torch.cat([these, other], 1)
    rest, least = 1 - known.exp().sum(-1, keepdim=True), torch.full_like(other, _ROUNDING)
    if known_is == "reference":
        least = least.minimum(whole.softmax(-1)[:, -1:] / math.e)
    rest = torch.where(rest < _ROUNDING, least, rest).log().masked_fill(other.isneginf(), -torch.inf)
    pair = torch.cat([known, rest], 1), whole
    figures = sequence_figures(*(pair if known_is == "reference" else pair[::-1]), distribution=True, labels=found)
    if figures.positions is not None:
        figures.positions.same_top = logits.argmax(-1) == likeliest
        # The merged class may be likelier than any single one. Known values are log-probabilities, others are logits.
        sure = known.amax(-1) if known_is == "reference" else logits.amax(-1) - whole.logsumexp(-1)
        figures.positions.confidence = sure.exp()
    return figures
