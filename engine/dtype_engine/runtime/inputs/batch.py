"""One call of the model, and all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from dtype_engine.core.errors import UserError
from dtype_engine.runtime.model.torch_private import WithoutModes
from dtype_engine.runtime.modes.op_tables import tensors_in


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
        """Of all its tensors: what the length of a pass goes by."""
        return sum(tensor.numel() for tensor in tensors_in(self.args, self.kwargs))

    def run(self, module: Callable[..., Any]) -> Any:
        """Call the module with tensors of its own: what it writes to them stays in this call."""
        own = _Copies()
        with WithoutModes():  # no operation of the model's
            args, kwargs = own.of(self.args), own.of(self.kwargs)
        return module(*args, **kwargs)

    def on(self, device: torch.device, floats: torch.dtype | None = None) -> Batch:
        """The same on a device, its float tensors in `floats` where given."""
        return Batch(
            tuple(_moved(value, device, floats) for value in self.args),
            {key: _moved(value, device, floats) for key, value in self.kwargs.items()},
            self.next_tokens,
            self.text,
            self.about,
        )


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


def _moved(value: Any, device: torch.device, floats: torch.dtype | None) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, floats) if floats is not None and value.is_floating_point() else value.to(device)
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(item, device, floats) for item in value)
    if isinstance(value, dict):
        return {key: _moved(item, device, floats) for key, item in value.items()}
    return value


class _Copies:
    """Copies of tensors, and of the lists, tuples and dicts that hold them. A tensor that is given twice stays one: attention asks
    whether its query is its key.
    """

    def __init__(self) -> None:
        self._made: dict[int, torch.Tensor] = {}

    def of(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in self._made:
                self._made[id(value)] = value.clone()
            return self._made[id(value)]
        if type(value) in (list, tuple):
            return type(value)(self.of(item) for item in value)
        if type(value) is dict:
            return {key: self.of(item) for key, item in value.items()}
        return value


def from_values(values: Any, description: str) -> Inputs:
    """Inputs from what a user gave: a dict (keyword arguments), a tuple (positional ones), a tensor, or a list of
    these.
    """
    several = values if isinstance(values, list) else [values]
    batches = []
    for value in several:
        if isinstance(value, dict):
            batches.append(Batch(kwargs=dict(value)))
        elif isinstance(value, tuple):
            batches.append(Batch(args=value))
        elif isinstance(value, torch.Tensor):
            batches.append(Batch(args=(value,)))
        else:
            raise UserError(
                f"{description} gave a {type(value).__name__}: give a dict (keyword arguments) or a tuple (positional ones)"
            )
    return Inputs(tuple(batches), description, made=False)
