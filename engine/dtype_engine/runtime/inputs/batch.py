"""The inputs of one forward pass (a batch) and those of a whole measurement, and their summary for the screen and for JSON."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from dtype_engine.core.errors import UserError
from dtype_engine.core.text import printable
from dtype_engine.results.inputs import InputBatch, InputsSummary, InputTensor
from dtype_engine.runtime.formats.dequantize import dtype_name
from dtype_engine.runtime.libraries.torch_private import WithoutModes
from dtype_engine.runtime.model.containers import copied, named_tensors_in, with_tensors

_SHOWN = 160
"""The maximum number of characters of a batch's text in a summary."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The inputs of one forward pass: its positional arguments, its keyword arguments and facts about them."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    next_tokens: torch.Tensor | None = None
    """The correct next tokens, int64 [batch, positions], with -100 for none; None if the model predicts no tokens."""
    text: str | None = None
    """The text from which the inputs were made, for display."""
    about: str | None = None
    """A short description of the picture or audio in this batch, such as "cat.png, 640 x 480"."""

    labels: dict[str, Any] = field(default_factory=dict)
    """Values in addition to the arguments, by name. The user's metrics receive them; the model does not."""

    @property
    def elements(self) -> int:
        """The number of elements in all tensors of this batch, from which the duration of a forward pass is estimated."""
        return sum(tensor.numel() for _, tensor in self.named_tensors())

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) for every tensor. A name is that of the argument (or "argument 0"), plus a dotted path if nested."""
        for index, value in enumerate(self.args):
            yield from named_tensors_in(f"argument {index}", value)
        for name, value in self.kwargs.items():
            yield from named_tensors_in(name, value)

    def named(self, module: nn.Module) -> dict[str, Any]:
        """Return all arguments of the forward pass of `module`, and the labels, by name."""
        positional = [
            name
            for name, parameter in inspect.signature(module.forward).parameters.items()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        return {**dict(zip(positional, self.args, strict=False)), **self.kwargs, **self.labels}

    def run(self, module: Callable[..., Any]) -> Any:
        """Call the module with copies of the tensors. Without copies, a module that writes to its arguments would change later
        calls. A tensor that occurs twice is copied once, because attention checks whether query and key are the same object.
        """
        copies: dict[int, torch.Tensor] = {}

        def once(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in copies:
                copies[id(tensor)] = copied(tensor)
            return copies[id(tensor)]

        with WithoutModes():  # the model does not call these operations
            args, kwargs = with_tensors((self.args, self.kwargs), once)
        return module(*args, **kwargs)

    def on(self, device: torch.device, floats: torch.dtype | None = None) -> Batch:
        """Return this batch with its tensors on a device. Float tensors are cast to `floats` if it is given."""

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device, floats if tensor.is_floating_point() else None)

        args, kwargs = with_tensors((self.args, self.kwargs), moved)
        return dataclasses.replace(self, args=args, kwargs=kwargs)

    def with_labels(self, names: Collection[str]) -> Batch:
        """Return this batch with the keyword arguments `names` as labels, which metrics receive and the model does not."""
        labels = {name: value for name, value in self.kwargs.items() if name in names}
        kwargs = {name: value for name, value in self.kwargs.items() if name not in names}
        return dataclasses.replace(self, kwargs=kwargs, labels=self.labels | labels)


@dataclass(frozen=True, slots=True)
class Inputs:
    """All inputs on which a model is run: one batch for each forward pass."""

    batches: tuple[Batch, ...]
    description: str
    """A short description of these inputs for the screen, such as "6 default prompts"."""
    tokenizer: Any = None
    made: bool = True
    """Whether this program created the tensors, for example from text; False if the user provided tensors."""
    prompts: bool = False
    """Whether each batch is a whole prompt, which text generation can continue."""
    made_of: tuple[str, ...] = ()
    """Phrases for the user which say how these inputs were created."""

    def __repr__(self) -> str:
        return f"Inputs: {printable(self.description, 300)}"


def from_values(values: Any, description: str) -> Inputs:
    """Convert a user's Python value to inputs. For one forward pass, the value is a mapping (keyword arguments), a tuple
    (positional arguments) or a single argument (a tensor, a packed sequence or a dataclass); for several passes, it is a list of
    these. Raises UserError for anything else.
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


def summarize(inputs: Inputs) -> InputsSummary:
    """Return the inputs as plain data."""
    batches = tuple(_row(batch) for batch in inputs.batches)
    known = [batch.positions for batch in batches if batch.positions is not None]
    made_of = inputs.made_of or (f"given by {inputs.description}",)
    return InputsSummary(inputs.description, made_of, sum(known) if known else None, batches)


def one_of_each_shape(inputs: Inputs) -> list[Batch]:
    """Return enough batches to check whether the model runs on all of them: of the user's tensors, the first batch of each
    combination of shapes and dtypes; otherwise one batch, because all were created alike.
    """
    if inputs.made:
        return list(inputs.batches[:1])
    by_shape: dict[object, Batch] = {}
    for batch in inputs.batches:
        by_shape.setdefault(tuple((name, tensor.shape, tensor.dtype) for name, tensor in batch.named_tensors()), batch)
    return list(by_shape.values())


def _row(batch: Batch) -> InputBatch:
    tensors = tuple(
        InputTensor(name, tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in batch.named_tensors()
    )
    text = printable(" ".join(batch.text[: 2 * _SHOWN].split()), _SHOWN) if batch.text else None
    if batch.about and text:
        description = f"{batch.about}: {text}"
    else:
        description = batch.about or text or ", ".join(tensor.name for tensor in tensors) or "nothing"
    return InputBatch(description, _positions(batch), tensors)


def _positions(batch: Batch) -> int | None:
    """Return the number of token positions in a batch, or None without tokens. If the decoder has its own tokens, they count."""
    ids, mask = batch.kwargs.get("input_ids"), batch.kwargs.get("attention_mask")
    if isinstance(of_decoder := batch.kwargs.get("decoder_input_ids"), torch.Tensor):
        return of_decoder.numel()
    if not isinstance(ids, torch.Tensor):
        return None
    return int(mask.sum()) if isinstance(mask, torch.Tensor) and mask.shape == ids.shape else ids.numel()
