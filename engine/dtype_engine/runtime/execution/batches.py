"""Joins sequences to one batch, and finds each sequence's part of what the model computes from it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dtype_engine.core.errors import UserError
from dtype_engine.core.execution import Execution
from dtype_engine.runtime.inputs import Batch
from dtype_engine.runtime.passes.forward_pass import ModuleObserver

_IDS, _MASK, _POSITIONS = "input_ids", "attention_mask", "position_ids"


@dataclass(frozen=True, slots=True)
class JoinedBatch:
    """Several batches as one. Shorter sequences are padded, with a mask that leaves the padding out."""

    batch: Batch
    starts: tuple[int, ...]
    """The index of the first example of each joined batch, and the number of all examples."""
    lengths: Mapping[int, Sequence[int]]
    """The number of tokens of each joined batch, by the number to which they were padded."""
    left: bool
    """Whether the padding is before the tokens, not after them."""

    def part(self, number: int, value: torch.Tensor) -> torch.Tensor | None:
        """Return the part of a module's output that belongs to the joined batch `number`, without padding, or None if it can't be
        told: neither the examples nor the tokens of all examples lie along its first dimension.
        """
        count, own = self.starts[-1], slice(self.starts[number], self.starts[number + 1])
        if value.ndim and value.shape[0] == count:
            return self._tokens(number, value[own])
        for width in self.lengths:
            if value.ndim and value.shape[0] == count * width:
                rows = value.reshape(count, width, *value.shape[1:])[own]
                return self._tokens(number, rows).flatten(0, 1)
        if value.ndim and len(value) == 1:  # the same for all examples, such as the angles of positions
            return self._tokens(number, value)
        return None

    def _tokens(self, number: int, rows: torch.Tensor) -> torch.Tensor:
        width = rows.shape[1] if rows.ndim > 1 else 0
        if width not in self.lengths:
            return rows
        length = self.lengths[width][number]
        return rows[:, width - length :] if self.left else rows[:, :length]


def join(batches: Sequence[Batch], module: nn.Module, execution: Execution) -> JoinedBatch:
    """Join batches to one. Integers of two dimensions, such as token ids, are padded to the longest; all else must have the same
    shape but for the number of examples. Raises UserError for inputs that can't be joined, and for padding that the model can't be
    told of.
    """
    names = [tuple(each.kwargs) for each in batches]
    if any(each.args for each in batches) or len(set(names)) > 1:
        raise UserError(f"batch={execution.batch} needs inputs by name, the same for each sequence")
    left, lengths, joined = execution.padding == "left", dict[int, list[int]](), dict[str, Any]()
    pad = getattr(getattr(module, "config", None), "pad_token_id", None)
    for name in names[0]:
        values = [each.kwargs[name] for each in batches]
        if not all(isinstance(value, torch.Tensor) and value.ndim for value in values):
            if any(value is not values[0] and value != values[0] for value in values[1:]):
                raise UserError(f"batch={execution.batch}: {name} has no dimension of examples")
            joined[name] = values[0]
            continue
        if all(value.ndim == 2 and not value.is_floating_point() for value in values):
            widths = [value.shape[1] for value in values]
            lengths[max(widths)] = widths
            fill = (pad if isinstance(pad, int) else 0) if name == _IDS else 0
            values = [_padded(value, max(widths), fill, left) for value in values]
        if len({value.shape[1:] for value in values}) > 1:
            raise UserError(
                f"batch={execution.batch}: {name} has another shape in each sequence, so they make no batch"
            )
        joined[name] = torch.cat(values)
    starts = [0]
    for each in batches:
        sizes = {value.shape[0] for value in each.kwargs.values() if isinstance(value, torch.Tensor) and value.ndim}
        if len(sizes) != 1:
            raise UserError(f"batch={execution.batch}: the inputs of a sequence have different numbers of examples")
        starts.append(starts[-1] + sizes.pop())
    if any(len(set(widths)) > 1 for widths in lengths.values()):
        _mask(joined, batches, module, execution)
    return JoinedBatch(Batch(kwargs=joined), tuple(starts), lengths, left)


def _padded(value: torch.Tensor, width: int, fill: int, left: bool) -> torch.Tensor:
    missing = width - value.shape[1]
    return nn.functional.pad(value, (missing, 0) if left else (0, missing), value=fill)


def _mask(joined: dict[str, Any], batches: Sequence[Batch], module: nn.Module, execution: Execution) -> None:
    """Add the mask that leaves the padding out, and the positions of tokens after padding, as `generate` computes them."""
    accepted = inspect.signature(module.forward).parameters
    if _IDS not in joined or _MASK not in accepted:
        raise UserError(
            f"batch={execution.batch}: {type(module).__name__} takes no {_MASK}, so sequences of different lengths make no batch"
        )
    left, width = execution.padding == "left", joined[_IDS].shape[1]
    if _MASK not in joined:
        ones = [torch.ones_like(each.kwargs[_IDS]) for each in batches]
        joined[_MASK] = torch.cat([_padded(each, width, 0, left) for each in ones])
    if left and _POSITIONS in accepted and _POSITIONS not in joined:
        joined[_POSITIONS] = (joined[_MASK].long().cumsum(-1) - 1).clamp_(min=0)


@dataclass
class PartObserver(ModuleObserver):
    """Gives an observer one sequence's part of each module's output. Outputs whose parts can't be told are left out."""

    observer: ModuleObserver
    joined: JoinedBatch
    number: int
    """The index of the sequence in the batch."""
    left_out: set[str] = field(default_factory=set)
    """The names of the modules whose outputs were left out."""

    def __call__(self, module: str, call: int, output: torch.Tensor) -> Any:
        part = self.joined.part(self.number, output)
        if part is None:
            self.left_out.add(module)
            return None
        return self.observer(module, call, part)

    def take_choice(self, module: str, call: int, chosen: torch.Tensor) -> None:
        part = self.joined.part(self.number, chosen)
        if part is not None:
            self.observer.take_choice(module, call, part)
