"""The inputs on which a model is run, as plain data for the app and for `--json`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class InputTensor:
    """One tensor argument of a forward pass. `name` is the argument's name, or its position if it has none."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class InputBatch:
    """The inputs of one forward pass."""

    what: str
    """What the user sees of the input: the beginning of the text, or a name for the image or audio."""
    positions: int | None
    """The number of token positions, over all rows of the batch, or None if the input is not a sequence of tokens. If the model has
    a decoder with its own inputs, the decoder's tokens are counted.
    """
    tensors: tuple[InputTensor, ...]


@dataclass(frozen=True, slots=True)
class InputsSummary:
    """All inputs on which the model is run in one measurement."""

    description: str
    made_of: tuple[str, ...]
    """A sentence for each component of the inputs, such as text or images, that says where it comes from."""
    positions: int | None
    batches: tuple[InputBatch, ...]
