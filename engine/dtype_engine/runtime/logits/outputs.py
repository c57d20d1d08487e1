"""What a file of outputs has: the tokens of its sequences and, for each sequence, logits or log-probabilities."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import torch

from dtype_engine.core.errors import UserError


@dataclass(frozen=True, slots=True)
class Outputs:
    """What a file has of one sequence: the outputs at consecutive positions."""

    first: int
    """The first position with outputs."""
    values: torch.Tensor
    """Logits, or log-probabilities in nats. Of all classes: [positions, classes], in any floating dtype. Of the likeliest classes
    alone: float64 [positions, k], with -infinity where a position has fewer than k.
    """
    ids: torch.Tensor | None = None
    """The classes of `values`, int64 [positions, k], or None if `values` has all classes in their order."""
    clipped: torch.Tensor | None = None
    """Which of the values are upper bounds of what they stand for, bool like `values`, or None if none are."""


class LogitsFile(ABC):
    """A file whose header and tokens were read and checked. Its outputs are read one sequence at a time.

    path: the file. form: whose form it has. tokens: the tokens on which to run the model, int64 [positions] for each sequence.
    classes: the size of the vocabulary, or None if the file does not say it. are_logits: whether the values are logits, and not
    log-probabilities. bounds: whether positions have the likeliest classes alone, so that a KL divergence is a lower bound.
    """

    def __init__(
        self,
        path: Path,
        form: str,
        tokens: list[torch.Tensor],
        classes: int | None,
        are_logits: bool = False,
        bounds: bool = False,
    ) -> None:
        self.path = path
        self.form = form
        self.tokens = tokens
        self.classes = classes
        self.are_logits = are_logits
        self.bounds = bounds

    def outputs(self, number: int, classes: int) -> Outputs:
        """Return the outputs for a sequence. classes: the size of the model's vocabulary. Raises UserError if the file can't be
        read, has another vocabulary, or has values that are NaN or infinite. A value may be -infinity: a probability of 0.
        """
        if self.classes is not None and self.classes != classes:
            raise UserError(
                f"{self.path} has {self.classes:,} values for each token, and the model's vocabulary has {classes:,}: it is "
                "of a model with another vocabulary"
            )
        read = self._read(number)
        if read.ids is not None and int(read.ids.max()) >= classes:
            raise UserError(
                f"{self.path}, sequence {number + 1}: it has token {int(read.ids.max())}, beyond the model's vocabulary of "
                f"{classes:,}"
            )
        if bool(read.values.isnan().any()) or bool(read.values.isposinf().any()):
            raise UserError(f"{self.path}, sequence {number + 1}: it has values that are NaN or infinite")
        return read

    @abstractmethod
    def _read(self, number: int) -> Outputs: ...
