"""Limits on a model's inputs and on the time to prepare them, because a few bytes in a file can demand gigabytes of memory."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from dtype_engine.core.errors import NoForward, UserError
from dtype_engine.core.hints import hint
from dtype_engine.core.number_ranges import Positive
from dtype_engine.core.typed_data import TypedFields

CHARACTERS_PER_TOKEN = 16
"""Allowed characters of text for each token of `InputLimits.tokens`. A token has about 4 on average."""
BYTES_PER_TOKEN = 256
"""Allowed bytes of a text file for each token of `InputLimits.tokens`. A JSON Lines file also holds other entries."""


@dataclass(frozen=True, slots=True, repr=False)
class InputLimits(TypedFields):
    """Limits on one input of a model. Each is checked before the memory is allocated or the time is spent.

    Example:
        >>> de.Options(limits=de.InputLimits(seconds=3600)).limits.pixels
        67108864
    """

    pixels: Positive = 64 << 20
    """Maximum number of pixels in an image file."""
    seconds: Positive = 600
    """Maximum length of an audio file in seconds."""
    values: Positive = 64 << 20
    """Maximum number of values in the tensor that the model gets for an image (pixels times channels times frames) or for audio
    (samples or frequency bins).
    """
    tokens: Positive = 1_000_000
    """Maximum number of tokens in all texts together. The texts may have 16 times as many characters."""
    template_seconds: Positive = 5
    """Maximum seconds for which the chat template may run on one conversation, and the tokenizer on each million characters."""
    template_bytes: Positive = 1 << 20
    """Maximum bytes of the text that the chat template makes from one conversation."""

    def refuse_file(self, kind: str, what: str, amount: float) -> None:
        """Raise UserError if a user's file exceeds the limit `kind`, such as "pixels". what: the file, with which the message
        begins. amount: the file's number of pixels, for example.
        """
        if amount > getattr(self, kind):
            raise UserError(f"{what} has {self._excess(kind, amount)}")

    def refuse_model(self, kind: str, title: str, what: str, amount: float) -> None:
        """Raise NoForward if a model's own files demand inputs over the limit `kind`. title: the model's name. what: the setting
        that demands such inputs. amount: in the limit's unit.
        """
        if amount > getattr(self, kind):
            raise NoForward(
                f"{title}: no forward pass: {what} asks for {self._excess(kind, amount)}; or {hint('tensors')}"
            )

    def _excess(self, kind: str, amount: float) -> str:
        option = f"--input-limit {kind.replace('_', '-')}={math.ceil(amount)}"
        unit = "bytes" if kind == "template_bytes" else kind
        return f"{math.ceil(amount):,} {unit}, more than the limit of {getattr(self, kind):,}; {option} raises it"


KINDS = tuple(field.name.replace("_", "-") for field in dataclasses.fields(InputLimits))
"""The names of all limits as the option --input-limit takes them, such as "pixels" and "template-seconds"."""
