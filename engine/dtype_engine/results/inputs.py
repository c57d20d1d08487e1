"""The inputs that a model is run on, as plain data for panes and `--json`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class InputTensor:
    """One tensor argument of a forward pass. `name` is its position where the argument has no name."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class InputBatch:
    """The inputs of one call of the model."""

    what: str
    """The beginning of the text, or a name for the image or the sound."""
    positions: int | None
    """The token positions in all rows, of the decoder where there is one; None for an input that is not a sequence of tokens."""
    tensors: tuple[InputTensor, ...]


@dataclass(frozen=True, slots=True)
class InputsSummary:
    """The inputs of all calls of the model in one measurement."""

    description: str
    made_of: tuple[str, ...]
    """One sentence for each part of the inputs that says where it comes from."""
    positions: int | None
    batches: tuple[InputBatch, ...]
