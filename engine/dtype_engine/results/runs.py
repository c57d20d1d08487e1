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
    """One prompt, continued greedily by the reference and by the candidate."""

    prompt: str
    reference: Written
    candidate: Written
    finished: bool = True
    """Whether both texts are complete. While they are generated, first the reference's grows, then the candidate's."""

    @property
    def same_tokens(self) -> int:
        """How many tokens at the start of both texts are the same."""
        pairs = zip(self.reference.ids, self.candidate.ids, strict=False)
        return next(
            (index for index, (one, other) in enumerate(pairs) if one != other),
            min(len(self.reference.ids), len(self.candidate.ids)),
        )

    @property
    def differs(self) -> bool:
        """Whether the two texts have different tokens. While they grow, only tokens that both have count."""
        if self.finished:
            return self.reference.ids != self.candidate.ids
        return self.same_tokens < min(len(self.reference.ids), len(self.candidate.ids))


@dataclass(frozen=True, slots=True)
class SpeedRow:
    """The wall time of forward passes over all inputs in one variant of the model."""

    what: str
    """The variant: "reference", "as stored" or "candidate"."""
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
