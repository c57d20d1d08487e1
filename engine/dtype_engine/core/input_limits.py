"""Limits on what a file may make the program compute while it creates a model's inputs. A few bytes can ask for gigabytes."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from dtype_engine.core.errors import NoForward, UserError
from dtype_engine.core.hints import hint

CHARACTERS_PER_TOKEN = 16
"""The length of text that `InputLimits.tokens` admits, in characters per token. Tokens have about 4 characters."""


@dataclass(frozen=True, slots=True)
class InputLimits:
    """What one input may ask for. Each limit is checked before the memory or the time is spent.

    Example:
        >>> de.Options(limits=de.InputLimits(seconds=3600)).limits.pixels
        67108864
    """

    pixels: int = 64 << 20
    """Pixels of a picture file."""
    seconds: int = 600
    """Seconds of audio in a file."""
    values: int = 64 << 20
    """Numbers in what is made for the model: pixels times channels times frames of a picture, samples or bins of audio."""
    tokens: int = 1_000_000
    """Tokens of all texts. A text may have 16 times as many characters."""
    template_seconds: int = 5
    """Seconds that the chat template may compute for a conversation, and the tokenizer for each million characters."""
    template_bytes: int = 1 << 20
    """Bytes of text that the chat template may make of a conversation."""

    def refuse_file(self, kind: str, what: str, amount: float) -> None:
        """Raise UserError if the user's file `what` has more than the limit. kind: a field's name."""
        if amount > getattr(self, kind):
            raise UserError(f"{what} has {self._excess(kind, amount)}")

    def refuse_model(self, kind: str, title: str, what: str, amount: float) -> None:
        """Raise NoForward if `what`, which the model's files say, asks for more than the limit. kind: a field's name."""
        if amount > getattr(self, kind):
            raise NoForward(
                f"{title}: no forward pass: {what} asks for {self._excess(kind, amount)}; or {hint('tensors')}"
            )

    def _excess(self, kind: str, amount: float) -> str:
        option = f"--input-limit {kind.replace('_', '-')}={math.ceil(amount)}"
        unit = "bytes" if kind == "template_bytes" else kind
        return f"{math.ceil(amount):,} {unit}, more than the limit of {getattr(self, kind):,}; {option} raises it"


KINDS = tuple(field.name.replace("_", "-") for field in dataclasses.fields(InputLimits))
"""The names of the limits on the command line."""
