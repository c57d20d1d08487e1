"""What runs of the model gave besides drift: text it wrote, and time. Times are seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Written:
    """Tokens that a model wrote: their ids, what each adds to the text, and the seconds that all of it took."""

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

    @property
    def same_tokens(self) -> int:
        """How many tokens from the start are the same."""
        pairs = zip(self.reference.ids, self.candidate.ids, strict=False)
        return next(
            (index for index, (one, other) in enumerate(pairs) if one != other),
            min(len(self.reference.ids), len(self.candidate.ids)),
        )

    @property
    def differs(self) -> bool:
        """Whether the two part at all."""
        return self.reference.ids != self.candidate.ids


@dataclass(frozen=True, slots=True)
class SpeedRow:
    """Wall time of forward passes over all inputs: `what` is "reference", "as stored" or "candidate", in `dtypes`.

    `seconds` is the median of `repeats` after one to warm up. `under_rules`: plain torch does not run this mix, so the time
    includes the casts that are added to it.
    """

    what: str
    dtypes: str
    seconds: float
    fastest: float
    slowest: float
    repeats: int
    tokens_per_second: float | None
    under_rules: bool


@dataclass(frozen=True, slots=True)
class SpeedReport:
    """How fast the model is in its dtypes, on this machine, over these inputs."""

    model: str
    device: str
    threads: int
    rules: tuple[str, ...]
    inputs: str
    rows: tuple[SpeedRow, ...]
    notices: tuple[str, ...] = ()
