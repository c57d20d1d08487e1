"""What a scan records of the operations that use weights: the call, its arguments, and how they were computed from weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dtype_engine.runtime.libraries.torch_private import is_wrapped, version_of
from dtype_engine.runtime.modes.op_tables import Arguments, replace_tensors, tensors_in
from dtype_engine.runtime.scan.kept_tensors import ActivationFile, KeptTensor

Remake = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class WeightOrigin:
    """How a tensor was computed from a single weight: it is the weight itself, a view of it, or a different function of it."""

    weight: str
    """The name of the weight, the first one if it has several."""
    remake: Remake
    """Computes the same tensor from other values of the weight, such as its values after a cast."""
    itself: bool
    """Whether the tensor is the weight itself, so that `remake` returns its argument."""
    rows: slice | None = None
    """If only one index of the weight's first dimension was read, such as one expert, a slice with this index: `remake` then also
    takes the values of this slice alone.
    """
    written: bool = False
    """Whether the tensor is the weight after the model has written to it."""


@dataclass(slots=True)
class WeightOp:
    """One operation of a pass that uses at least one weight."""

    func: Any
    name: str
    module: str
    args: Arguments
    kwargs: dict[str, Any]
    sources: dict[int, WeightOrigin]
    """How arguments were computed from weights, by the `id` of the argument."""
    outputs: list[torch.Tensor] = field(default_factory=list)
    dtypes_read: frozenset[str] = frozenset()
    """The weights whose dtype the model's code read just before this operation, probably to cast the activations to it, as in
    `x.to(weight.dtype) * weight`.
    """
    versions: list[int] = field(init=False)
    """torch's version counters of the arguments and outputs when the operation ended. They reveal later writes."""
    block: str = ""
    """The name of the block (such as a decoder layer) in which the operation ran, if the model is larger than memory."""
    gradients: list[list[tuple[int, torch.Tensor]]] = field(default_factory=list)
    """For each output, the gradients received so far: pairs (number of the backward pass, gradient [elements])."""
    kept: dict[int, KeptTensor] = field(default_factory=dict)
    """The activations that are written to a file, by the `id`s of the tensors without memory that take their place."""

    def __post_init__(self) -> None:
        self.versions = [version_of(tensor) for tensor in self._held()]

    @property
    def weights(self) -> tuple[str, ...]:
        """The names of the weights among the arguments, each once."""
        return tuple(dict.fromkeys(source.weight for source in self.sources.values()))

    @property
    def overwritten(self) -> bool:
        """Whether the model wrote to activations among the arguments, or to outputs, after the operation."""
        kept = any(each.changed for each in self.kept.values())
        return kept or [version_of(tensor) for tensor in self._held()] != self.versions

    def loaded(self, file: ActivationFile | None) -> WeightOp:
        """Return the operation with its activations read back from `file`, or the operation itself if none were written."""
        if file is None or not self.kept:
            return self
        loaded = {key: file.load(each) for key, each in self.kept.items()}
        args, kwargs = replace_tensors(self.args, self.kwargs, loaded)
        outputs = [loaded.get(id(tensor), tensor) for tensor in self.outputs]
        return replace(self, args=args, kwargs=kwargs, outputs=outputs, kept={})

    def with_stand_ins(self, stand_ins: Mapping[int, torch.Tensor]) -> WeightOp:
        """Return the operation with some arguments replaced. stand_ins: the new tensors, by the `id` of the old ones."""
        args, kwargs = replace_tensors(self.args, self.kwargs, stand_ins)
        sources = {id(stand_ins[key]) if key in stand_ins else key: each for key, each in self.sources.items()}
        return replace(self, args=args, kwargs=kwargs, sources=sources)

    @property
    def activations(self) -> list[torch.Tensor]:
        """The arguments that do not come from a weight."""
        return [tensor for tensor in tensors_in(self.args, self.kwargs) if id(tensor) not in self.sources]

    def _held(self) -> list[torch.Tensor]:
        return [*self.activations, *self.outputs]

    @property
    def held_activations(self) -> list[torch.Tensor]:
        """The outputs, and the activations among the arguments, without those that are written to a file."""
        return [tensor for tensor in self._held() if id(tensor) not in self.kept and not is_wrapped(tensor)]


@dataclass(frozen=True, slots=True)
class ValueRead:
    """A call that gave the model's code a truth value or an integer computed from one weight, for example `isfinite(w).all()`."""

    func: Any
    args: Arguments
    kwargs: dict[str, Any]
    source: tuple[int, WeightOrigin]
    """The `id` of the only tensor in `args` or `kwargs`, and how this tensor was computed from the weight."""
    answer: bool | int

    def differs(self, value: torch.Tensor) -> bool:
        """Return whether the call would give the model's code a different answer if the weight had the values `value`."""
        key, origin = self.source
        args, kwargs = replace_tensors(self.args, self.kwargs, {key: origin.remake(value)})
        return bool(self.func(*args, **kwargs) != self.answer)
