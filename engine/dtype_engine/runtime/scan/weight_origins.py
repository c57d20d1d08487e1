"""Which tensors of a pass were computed from a single weight, such as its views, and how."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping

import torch

from dtype_engine.runtime.libraries.torch_private import is_wrapped, version_of
from dtype_engine.runtime.model.weight import Weight
from dtype_engine.runtime.modes.op_tables import Arguments, tensors_in
from dtype_engine.runtime.scan.graph_memory import WeightView
from dtype_engine.runtime.scan.weight_ops import Remake, WeightOrigin


class WeightOrigins:
    """Remembers how tensors of a pass were computed from single weights.

    weights: by the `id` of the tensor in the module. replaced: the `id`s of the weights that the pass replaces by other values.
    """

    def __init__(self, weights: Mapping[int, Weight], replaced: Collection[int]) -> None:
        self.weights = weights
        self.hidden: set[int] = set()
        """The `id`s of the weights to which the pass has written in a way that can't be repeated on other values."""
        self.views: dict[int, WeightView] = {}
        """If the graph holds no weights: the views of weights' values that the model's code still holds, by their `id`."""
        self._made: dict[int, tuple[torch.Tensor | None, WeightOrigin]] = {}
        """How tensors were computed from weights, by the tensors' `id`: (the tensor, or None if it is in `views`; its origin)."""
        self._by_location = {_location(weight.tensor): key for key, weight in weights.items() if key not in replaced}
        """The `id` of a tensor in `weights` or `_made`, by `_location`, for `nn.Parameter(tensor)`, which no mode can intercept.
        """

    def of(self, tensor: torch.Tensor) -> WeightOrigin | None:
        """Return how a tensor was computed from a weight, or None if it was not, or if the weight is not followed."""
        key = id(tensor)
        if key not in self._made and key not in self.weights and (place := _location(tensor)) is not None:
            key = self._by_location.get(place, 0)
        known = self._made.get(key)
        if known is not None:
            return known[1]
        weight = self.weights.get(key)
        if weight is None or key in self.hidden or not (weight.info.castable or not weight.reference.plain):
            return None
        return WeightOrigin(weight.info.name, _same, True)

    def among(self, tensors: Iterable[torch.Tensor]) -> dict[int, WeightOrigin]:
        """Return how those of `tensors` that come from a weight were computed, by their `id`."""
        return {id(tensor): origin for tensor in tensors if (origin := self.of(tensor)) is not None}

    def note(self, tensor: torch.Tensor, origin: WeightOrigin, view: WeightView | None = None) -> None:
        """Remember how a tensor was computed from a weight. view: the weight's values with which the tensor shares memory, if the
        graph holds no weights. If a view is given, this object does not keep the tensor in memory.
        """
        key, place = id(tensor), _location(tensor)
        self._by_location.setdefault(place, key)
        if view is None:
            self._made[key] = tensor, origin
            return
        self._made[key], self.views[key] = (None, origin), view

        def forget() -> None:
            self._made.pop(key, None)
            self.views.pop(key, None)
            if self._by_location.get(place) == key:
                del self._by_location[place]

        weakref.finalize(tensor, forget).atexit = False

    def note_part(self, key: int, index: int, part: torch.Tensor) -> None:
        """Remember that `part` has the values of a weight at one index of its first dimension. key: the weight's `id`."""
        weight = self.weights[key]
        count = weight.stored.shape[0]

        def remake(values: torch.Tensor) -> torch.Tensor:
            return values[index if len(values) == count else 0]

        rows = slice(index, index + 1)
        view = WeightView(key, index, part.dtype, version_of(part))
        self.note(part, WeightOrigin(weight.info.name, remake, False, rows), view)

    def note_written(self, key: int, weight: str, remake: Remake) -> None:
        """Remember that the model has written to a weight. key: the `id` of the weight's tensor. remake: computes the written
        values from other values of `weight`.
        """
        self._made[key] = self.weights[key].tensor, WeightOrigin(weight, remake, itself=False, written=True)

    def forget(self, key: int, tensor: torch.Tensor) -> None:
        """Remember that a tensor is no longer a function of one weight. key: the `id` of the tensor. tensor: the tensor or, if the
        operation computed with other values in its place, these values.
        """
        self._made.pop(key, None)
        self._by_location.pop(_location(tensor), None)

    def hide(self, keys: Iterable[int]) -> set[str]:
        """Stop following some weights, because the pass has changed their memory in an unknown way. Returns their names. keys: the
        `id`s of tensors. Tensors that are no weights are ignored.
        """
        found = self.weights.keys() & keys
        names = {self.weights[key].info.name for key in found}
        if names:
            self.hidden |= found
            self._made = {key: made for key, made in self._made.items() if made[1].weight not in names}
        return names

    def stand_ins(self, args: Arguments, kwargs: dict[str, object]) -> dict[int, torch.Tensor]:
        """Return a tensor without memory for each argument that is a view of a weight's values, keyed by the `id` of the view."""
        views = [tensor for tensor in tensors_in(args, kwargs) if id(tensor) in self.views]
        return {id(tensor): torch.empty_like(tensor, device="meta") for tensor in views}

    def release(self) -> None:
        self._made.clear()
        self._by_location.clear()


_Place = tuple[int, torch.dtype, torch.Size, tuple[int, ...]]


def _location(tensor: torch.Tensor) -> _Place | None:
    """Return where a tensor's values are in memory (address, dtype, shape and strides), or None if it has no memory of its own."""
    if tensor.layout is not torch.strided or tensor.is_nested or is_wrapped(tensor) or not tensor.numel():
        return None
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
