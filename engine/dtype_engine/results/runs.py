"""Results of running a model, except drift: generated texts, and times in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Written:
    """A text that a model generated: the IDs of its tokens, the text that each token adds, and the time for all tokens."""

    ids: tuple[int, ...]
    pieces: tuple[str, ...]
    seconds: float

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Generation:
    """One prompt, and the texts with which the reference and the candidate continue it, by greedy decoding."""

    prompt: str
    reference: Written
    candidate: Written
    finished: bool = True
    """Whether the texts of both models are complete. While they are generated, first the reference's grows, then the
    candidate's.
    """

    @property
    def same_tokens(self) -> int:
        """How many tokens the texts of the reference and the candidate have in common at their beginning."""
        pairs = zip(self.reference.ids, self.candidate.ids, strict=False)
        return next(
            (index for index, (one, other) in enumerate(pairs) if one != other),
            min(len(self.reference.ids), len(self.candidate.ids)),
        )

    @property
    def differs(self) -> bool:
        """Whether the texts of the reference and the candidate differ in a token. While they are generated, only as many tokens
        count as both texts have.
        """
        if self.finished:
            return self.reference.ids != self.candidate.ids
        return self.same_tokens < min(len(self.reference.ids), len(self.candidate.ids))


@dataclass(frozen=True, slots=True)
class SpeedRow:
    """How long forward passes over all inputs take in one variant of the model, in seconds of wall time."""

    what: str
    """The variant of the model: "reference", "as stored" or "candidate"."""
    dtypes: str
    seconds: float
    """The median time of `repeats` passes after one warm-up pass."""
    fastest: float
    slowest: float
    repeats: int
    tokens_per_second: float | None
    under_rules: bool
    """Whether plain torch would refuse to run the model in this mix of dtypes. The measured times then include casts that this
    program inserts.
    """


@dataclass(frozen=True, slots=True)
class SpeedReport:
    """The speed of a model in different dtypes, on one machine and over the same inputs."""

    model: str
    device: str
    threads: int
    rules: tuple[str, ...]
    inputs: str
    rows: tuple[SpeedRow, ...]
    notices: tuple[str, ...] = ()
