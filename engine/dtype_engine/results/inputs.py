"""What the model is run on, as plain data for panes and `--json`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class InputTensor:
    """One tensor argument of a forward pass, by its name, or its place where it has none."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class InputBatch:
    """One call of the model.

    `what`: the beginning of its text, its picture or its sound. `positions`: token positions over its rows (the decoder's,
    where there is one); None for an input that is no sequence of tokens.
    """

    what: str
    positions: int | None
    tensors: tuple[InputTensor, ...]


@dataclass(frozen=True, slots=True)
class InputsSummary:
    """All calls of the model that a measurement makes; `made_of` says where each part came from, a sentence each."""

    description: str
    made_of: tuple[str, ...]
    positions: int | None
    batches: tuple[InputBatch, ...]
