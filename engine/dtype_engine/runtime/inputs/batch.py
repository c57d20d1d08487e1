"""One call of the model, and all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from dtype_engine.core.errors import UserError
from dtype_engine.runtime.model.containers import named_tensors_in, with_tensors
from dtype_engine.runtime.model.torch_private import WithoutModes


@dataclass(frozen=True, slots=True)
class Batch:
    """One call of the module. `next_tokens` ([batch, positions], int64, -100 where there is none) is what a language
    model should have predicted at each position. `about` says what it is where the text does not: a picture, a sound."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    next_tokens: torch.Tensor | None = None
    text: str | None = None
    about: str | None = None

    @property
    def elements(self) -> int:
        """The elements of all its tensors, from which the length of a pass is estimated."""
        return sum(tensor.numel() for _, tensor in self.named_tensors())

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor with its argument's name: positional ones by their index, nested ones with a dot."""
        for index, value in enumerate(self.args):
            yield from named_tensors_in(f"argument {index}", value)
        for name, value in self.kwargs.items():
            yield from named_tensors_in(name, value)

    def run(self, module: Callable[..., Any]) -> Any:
        """Call the module with copies of the tensors, so that what it writes to them stays in this call. A tensor that is given
        twice is copied once: attention asks whether its query is its key.
        """
        copies: dict[int, torch.Tensor] = {}

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in copies:
                copies[id(tensor)] = tensor.clone()
            return copies[id(tensor)]

        with WithoutModes():  # the model does not call these operations
            args, kwargs = with_tensors((self.args, self.kwargs), copied)
        return module(*args, **kwargs)

    def on(self, device: torch.device, floats: torch.dtype | None = None) -> Batch:
        """The same on a device, its float tensors in `floats` where given."""

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device, floats if tensor.is_floating_point() else None)

        args, kwargs = with_tensors((self.args, self.kwargs), moved)
        return dataclasses.replace(self, args=args, kwargs=kwargs)


@dataclass(frozen=True, slots=True)
class Inputs:
    """All batches, and what they are in a few words for the screen.

    made: they were made up here, not given as tensors. prompts: each is a whole prompt, to be continued as it is.
    made_of: where each part came from, a sentence each.
    """

    batches: tuple[Batch, ...]
    description: str
    tokenizer: Any = None
    made: bool = True
    prompts: bool = False
    made_of: tuple[str, ...] = ()


def from_values(values: Any, description: str) -> Inputs:
    """Inputs from what a user gave: a mapping (keyword arguments), a tuple (positional ones), one argument that is a tensor, a
    packed sequence or a dataclass, or a list of these. Raises UserError for anything else.
    """
    several = values if isinstance(values, list) else [values]
    batches = []
    for value in several:
        one_argument = isinstance(value, (torch.Tensor, PackedSequence)) or (
            dataclasses.is_dataclass(value) and not isinstance(value, (type, Mapping))
        )
        if one_argument:
            batches.append(Batch(args=(value,)))
        elif isinstance(value, Mapping):
            batches.append(Batch(kwargs=dict(value)))
        elif isinstance(value, tuple):
            batches.append(Batch(args=tuple(value)))
        else:
            raise UserError(
                f"{description} gave a {type(value).__name__}: give a dict (keyword arguments) or a tuple (positional ones)"
            )
    return Inputs(tuple(batches), description, made=False)
