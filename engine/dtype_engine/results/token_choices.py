"""The tokens that a candidate would choose in a text of the reference, at each position after the reference's own tokens."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal, get_args

from dtype_engine.core.text import brief
from dtype_engine.core.units import plural
from dtype_engine.results.attribution import NoiseFloor
from dtype_engine.results.runs import Written

EDGES = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0)
"""The limits between the bins of the histogram of severities, in nats."""
Kind = Literal["identical", "tie", "different"]


@dataclass(frozen=True, slots=True)
class TextChoices:
    """A text that the reference wrote by greedy decoding, and what the candidate would choose at each of its tokens. The tuples
    have an entry for each token of the text.
    """

    prompt: str
    reference: Written
    """The text of the reference."""
    candidate_ids: tuple[int, ...]
    """The most likely token of the candidate after the prompt and the reference's earlier tokens, or -1 if its logits have NaN."""
    candidate_pieces: tuple[str, ...]
    """The text that each token of the candidate would add."""
    severities: tuple[float, ...]
    """By how much the reference's log-probability of its most likely token is above that of the candidate's token, in nats. 0 for
    the same token. Infinity if the candidate's logits have NaN, or if the reference rules its token out.
    """
    kinds: tuple[Kind, ...]
    """identical: the candidate has the text's token. tie: another one, with a severity up to the margin. different: the rest."""

    @property
    def first_different(self) -> int | None:
        """The index of the first token of the kind "different", or None."""
        return self.kinds.index("different") if "different" in self.kinds else None


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first token at which the candidate differs by more than a tie."""

    prompt: int
    """The number of the prompt, from 0."""
    token: int
    """The index of the token in the text, from 0."""
    reference_id: int
    reference_piece: str
    candidate_id: int
    candidate_piece: str
    severity: float
    """In nats, as in `TextChoices`."""


@dataclass(frozen=True, slots=True)
class TokenReport:
    """The texts that the reference writes for some prompts, and whether the candidate would choose the same tokens in them."""

    model: str
    device: str
    rules: tuple[str, ...]
    inputs: str
    texts: tuple[TextChoices, ...]
    margin: float | None
    """The largest severity in nats of a token that differs by a tie: the largest change that the noise floors have of the
    difference between the log-probabilities of the two most likely tokens. None if no floor was measured; then no token is a tie.
    """
    floor: NoiseFloor | None = None
    """The noise floor of the reference on the prompts and texts. None if it was not measured."""
    candidate_floor: NoiseFloor | None = None
    """That of the candidate. None if it was not measured, such as for a candidate that does not compute in 16 bits."""
    notices: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """The number of tokens in all texts."""
        return sum(len(text.kinds) for text in self.texts)

    @property
    def counts(self) -> dict[Kind, int]:
        """The number of tokens of each kind in all texts."""
        kinds: tuple[Kind, ...] = get_args(Kind)
        return {kind: sum(text.kinds.count(kind) for text in self.texts) for kind in kinds}

    @property
    def _differing(self) -> list[float]:
        return [
            severity
            for text in self.texts
            for severity, kind in zip(text.severities, text.kinds, strict=True)
            if kind != "identical"
        ]

    @property
    def histogram(self) -> tuple[int, ...]:
        """How many of the tokens that differ, ties or not, have a severity below the first edge of `EDGES`, from each edge to the
        next, and from the last edge on, infinite ones included.
        """
        counts = [0] * (len(EDGES) + 1)
        for severity in self._differing:
            counts[bisect_right(EDGES, severity)] += 1
        return tuple(counts)

    @property
    def largest_severity(self) -> float | None:
        """The largest severity in nats, or None if no token differs."""
        return max(self._differing, default=None)

    @property
    def first_difference(self) -> FirstDifference | None:
        """The first token of the kind "different", in the order of the prompts, or None."""
        for number, text in enumerate(self.texts):
            if (at := text.first_different) is not None:
                return FirstDifference(
                    number, at, text.reference.ids[at], text.reference.pieces[at], text.candidate_ids[at],
                    text.candidate_pieces[at], text.severities[at],
                )  # fmt: skip
        return None

    @property
    def margin_from(self) -> str:
        """Words that say from which runs the margin comes, such as "the candidate with eager attention, batch of two"."""
        floors = [("the reference", self.floor), ("the candidate", self.candidate_floor)]
        named = [f"{who} with {', '.join(floor.ways)}" for who, floor in floors if floor is not None and floor.ways]
        return "; ".join(named)

    def __repr__(self) -> str:
        largest, counts = self.largest_severity, self.counts
        return brief(
            f"TokenReport: {plural(self.tokens, 'token')} in {plural(len(self.texts), 'text')} of {self.model}",
            ("same", f"{counts['identical']}, {plural(counts['tie'], 'tie')}, {counts['different']} different"),
            ("largest", "" if largest is None else severity_text(largest)),
            ("inputs", self.inputs),
        )


def severity_text(severity: float) -> str:
    """Return a severity with its unit, such as "0.31 nats". Infinity becomes words."""
    return "without bound" if math.isinf(severity) else f"{severity:.2g} nats" if severity else "0 nats"
