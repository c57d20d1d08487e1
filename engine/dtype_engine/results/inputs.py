"""The inputs on which a model is run."""

from __future__ import annotations

from dataclasses import dataclass

from dtype_engine.core.text import brief
from dtype_engine.core.units import plural


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
    """A description of the inputs: the beginning of the text, or a name for the image or audio."""
    positions: int | None
    """The number of tokens in all rows (of the decoder's inputs, if it has its own). None if the input is no sequence of tokens."""
    tensors: tuple[InputTensor, ...]


@dataclass(frozen=True, slots=True)
class InputsSummary:
    """All inputs on which the model is run in one measurement."""

    description: str
    made_of: tuple[str, ...]
    """A sentence for each component, such as text or images, that says where it comes from."""
    positions: int | None
    batches: tuple[InputBatch, ...]

    def __repr__(self) -> str:
        return brief(
            f"InputsSummary: {self.description}",
            ("made of", ", ".join(self.made_of)),
            (
                "batches",
                f"{len(self.batches):,}" + ("" if self.positions is None else f", {plural(self.positions, 'token')}"),
            ),
        )
