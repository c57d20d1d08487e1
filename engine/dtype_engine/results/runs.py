"""Results of running a model, except drift: generated texts, and times in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

from dtype_engine.core.text import brief
from dtype_engine.core.units import plural, seconds_text


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
    """A prompt, and the texts with which the reference and the candidate continue it, by greedy decoding."""

    prompt: str
    reference: Written
    candidate: Written
    finished: bool = True
    """Whether both texts are complete. The reference generates its text first, then the candidate."""

    @property
    def same_tokens(self) -> int:
        """The number of tokens at the beginning that both texts have in common."""
        pairs = zip(self.reference.ids, self.candidate.ids, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    @property
    def differs(self) -> bool:
        """Whether the texts differ in a token. Until both are complete, only tokens up to the end of the shorter one count."""
        if self.finished:
            return self.reference.ids != self.candidate.ids
        return self.same_tokens < min(len(self.reference.ids), len(self.candidate.ids))

    def __repr__(self) -> str:
        return brief(
            f"Generation: {plural(len(self.candidate.ids), 'token')}, of which the first {self.same_tokens:,} are the same",
            ("prompt", repr(self.prompt)),
            ("before", repr(self.reference.text)),
            ("after", repr(self.candidate.text)),
        )


@dataclass(frozen=True, slots=True)
class SpeedRow:
    """How long forward passes over all inputs take in one variant of the model, in seconds of wall time."""

    what: str
    """The variant: "reference", "as stored" or "candidate"."""
    dtypes: str
    seconds: float
    """The median of `repeats` passes after a warm-up."""
    fastest: float
    slowest: float
    repeats: int
    tokens_per_second: float | None
    under_rules: bool
    """Whether plain torch would refuse this mix of dtypes. The times then include casts that this program inserts."""


@dataclass(frozen=True, slots=True)
class SpeedReport:
    """The speed of a model in different dtypes over the same inputs."""

    model: str
    device: str
    threads: int
    rules: tuple[str, ...]
    inputs: str
    rows: tuple[SpeedRow, ...]
    notices: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return brief(
            f"SpeedReport: {self.model} on {self.device} with {plural(self.threads, 'thread')}",
            ("rules", ", ".join(self.rules) or "none: as stored"),
            ("pass", ", ".join(f"{row.what} {seconds_text(row.seconds)}" for row in self.rows)),
            ("inputs", self.inputs),
        )
