"""Records the operations of a reference run that use weights: every torch call with a weight, or a view of a weight, as an
argument.

A pass under `WeightOpRecorder` computes the reference with an autograd graph. The recorder stores each of these operations with its
arguments, and puts a hook on the output that receives the gradient in the backward pass. The recorder needs no knowledge of modules
or architectures.

Some uses of a weight can't be followed to the output: Python reads its values, gradients are off, or the model writes to its memory
or computes gradients itself. The names of these weights are in `unfollowed`.

If the model detaches activations from the graph, they are followed nevertheless, since what is computed from them still depends on
weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from dtype_engine.core.callbacks import ignore
from dtype_engine.runtime.model.live import Weight
from dtype_engine.runtime.model.torch_private import (
    WeakIdKeyDictionary,
    base_of,
    is_wrapped,
    unwrapped,
    version_of,
)
from dtype_engine.runtime.modes.op_tables import (
    TENSOR_PROPERTIES,
    Arguments,
    is_in_place,
    replace_tensors,
    takes_rows,
    tensors_in,
)
from dtype_engine.runtime.modes.promotion import call_mixed
from dtype_engine.runtime.modes.reference import ReferenceMode
from dtype_engine.runtime.scan.kept_tensors import ActivationFile, KeptTensor, is_keepable, value_of
from dtype_engine.runtime.scan.routing import TopKCall, record_topk
from dtype_engine.runtime.weights.budget import BlockVisits

Remake = Callable[[torch.Tensor], torch.Tensor]
_COPIES_VALUES = frozenset({"numpy", "__array__", "__dlpack__", "__deepcopy__", "__reduce_ex__"})
"""Methods that torch refuses for a tensor with an autograd graph, as it refuses every call with `out`. Activations have one only in
a scan, so the recorder detaches them for these calls.
"""
_NO_VALUES = (str, torch.dtype, torch.Size, torch.device, type(None))
"""Types of results that say nothing about a weight's values, such as its shape or dtype. A call with such a result does not make a
weight `unfollowed`.
"""


@dataclass(frozen=True, slots=True)
class WeightOrigin:
    """How a tensor was computed from a single weight: it is the weight itself, a view of it, or a different function of it."""

    weight: str
    """The name of the weight, the first one if it has several."""
    remake: Remake
    """A function that computes the same tensor from other values of the weight, such as its values after a cast."""
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
    """How arguments were computed from weights, by the `id` of the argument. Arguments that do not come from a weight are left
    out.
    """
    outputs: list[torch.Tensor]
    dtypes_read: frozenset[str] = frozenset()
    """The weights whose dtype the model's code read just before this operation, probably to cast the activations to it, as in
    `x.to(weight.dtype) * weight`.
    """
    versions: list[int] = field(default_factory=list)
    """torch's version counters of the arguments and outputs when the operation ended. They reveal later writes."""
    block: str = ""
    """If the model is larger than memory, the name of the block (such as a decoder layer) in which the operation ran. Otherwise
    "".
    """
    gradients: list[list[tuple[int, torch.Tensor]]] = field(default_factory=list)
    """For each output, the gradients received so far: pairs (number of the backward pass, gradient [elements])."""
    kept: dict[int, KeptTensor] = field(default_factory=dict)
    """If activations are written to a file: what stands for each activation among the arguments and outputs, which are then tensors
    without memory, by their `id`.
    """

    @property
    def weights(self) -> tuple[str, ...]:
        """The names of the weights among the arguments, each once."""
        return tuple(dict.fromkeys(source.weight for source in self.sources.values()))

    @property
    def overwritten(self) -> bool:
        """Whether the model wrote to activations among the arguments, or to outputs, after the operation, so that a rerun would use
        other values. A rerun computes arguments that come from a weight again.
        """
        kept = any(each.changed for each in self.kept.values())
        return kept or [version_of(tensor) for tensor in self._held()] != self.versions

    def loaded(self, file: ActivationFile | None) -> WeightOp:
        """Return the operation with the activations that were written to `file`, or itself if there are none."""
        if file is None or not self.kept:
            return self
        loaded = {key: file.load(each) for key, each in self.kept.items()}
        args, kwargs = replace_tensors(self.args, self.kwargs, loaded)
        outputs = [loaded.get(id(tensor), tensor) for tensor in self.outputs]
        return replace(self, args=args, kwargs=kwargs, outputs=outputs, kept={})

    def _held(self) -> list[torch.Tensor]:
        given = [tensor for tensor in tensors_in(self.args, self.kwargs) if id(tensor) not in self.sources]
        return [*given, *self.outputs]

    @property
    def held_activations(self) -> list[torch.Tensor]:
        """The arguments that do not come from a weight, and the outputs."""
        return [tensor for tensor in self._held() if id(tensor) not in self.kept and not is_wrapped(tensor)]

    def note_versions(self) -> None:
        """Store torch's version counters of the arguments and outputs, so that `overwritten` can compare them later."""
        self.versions = [version_of(tensor) for tensor in self._held()]


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor that shares memory with values that the pass has read of a weight."""

    key: int
    """The `id` of the weight's tensor."""
    index: int | None
    """The only index of the weight's first dimension that was read, or None if all of it was read."""
    dtype: torch.dtype
    version: int
    """torch's version counter of the values when they were read. It reveals later writes."""


@dataclass(frozen=True, slots=True)
class _Remembered:
    """Stands for a view of a weight's values in an autograd graph that holds no weights. It says how to read the values and make
    the view again.
    """

    weight: Weight
    index: int | None
    """The only index of the weight's first dimension that was read, or None if all of it was read."""
    block: str
    """The name of the model's block (such as a decoder layer) in which the weight was used."""
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    """The index of the view's first element in the memory of the values."""


@dataclass(frozen=True, slots=True)
class ValueRead:
    """A call that gave the model's code a truth value or an integer computed from one weight, for example because the code checks
    that all values are finite.
    """

    func: Any
    args: Arguments
    kwargs: dict[str, Any]
    source: tuple[int, WeightOrigin]
    """The `id` of the only tensor in `args` or `kwargs`, and how this tensor was computed from the weight."""
    answer: bool | int

    def differs(self, value: torch.Tensor) -> bool:
        """Return whether the model's code would have got a different answer if the weight had the values `value`."""
        key, origin = self.source
        args, kwargs = replace_tensors(self.args, self.kwargs, {key: origin.remake(value)})
        return bool(self.func(*args, **kwargs) != self.answer)


class WeightOpRecorder(ReferenceMode):
    """Runs the reference with an autograd graph, and records every operation that uses a weight.

    `topk_calls` holds the `topk` calls whose scores depend on a weight. `dtype_read` holds the weights of operations whose output
    dtype the model's code has read. `unfollowed` holds the weights that were used in a way that could not be recorded. `answers`
    holds what the code has read of the values of other weights.

    wanted: the weights whose operations are recorded. copies: the indexes, in the order of the pass, of operations whose tensors
    are copied, because the model overwrites them later. on_gradient: called in the backward pass as `on_gradient(operation, index
    of the output, gradient)`. rereads: whether the autograd graph holds no weights that a reference run widens or decodes, because
    these copies would take too much memory. The backward pass then makes them again. visits: if the model is larger than memory,
    the object that loads its blocks in turn. This implies `rereads`, and the backward pass calls `enter_block(name)` before it
    reads weights of another block. file: where activations are kept until the backward passes; None: in memory.
    """

    def __init__(
        self,
        weights: Mapping[int, Weight],
        device: torch.device,
        wanted: frozenset[str],
        on_gradient: Callable[[WeightOp, int, torch.Tensor], None],
        copies: frozenset[int] = frozenset(),
        rereads: bool = False,
        visits: BlockVisits | None = None,
        enter_block: Callable[[str], None] = ignore,
        file: ActivationFile | None = None,
    ) -> None:
        super().__init__(weights, device)
        self.rereads = rereads or visits is not None
        self.visits = visits
        self.enter_block = enter_block
        self.file = file
        self._replacing: dict[int, _View] = {}
        """The weights whose values the running operation uses, by the address of the values' memory."""
        self._views: dict[int, _View] = {}
        """If the graph holds no weights: the views of weights' values that the model's code now has, by their `id`."""
        self.operations: list[WeightOp] = []
        self.wanted = wanted
        self.on_gradient = on_gradient
        self.copies = copies
        self.topk_calls: list[TopKCall] = []
        self.dtype_read: list[str] = []
        self.unfollowed: set[str] = set()
        """The weights that the model used in a way that the recorder could not follow to the output."""
        self.answers: list[ValueRead] = []
        """What the model's code has read of the values of weights as a truth value or an integer, which may be the same after a
        cast.
        """
        self._own_dtypes_read: set[str] = set()
        """The weights whose `dtype` the model's code has read since the last recorded operation."""
        self._made: dict[int, tuple[torch.Tensor | None, WeightOrigin]] = {}
        """How tensors were computed from weights, by their `id`: (the tensor, unless it is in `_views`, and how)."""
        self._by_location = {
            _location(weight.tensor): key for key, weight in weights.items() if key not in self.replaced
        }
        """For each location in memory (see `_location`): the `id` of the tensor in `weights` or `_made` that is there. With it, the
        recorder recognizes a tensor made by `nn.Parameter(tensor)`, a call that no mode can intercept.
        """
        self._opaque: set[int] = set()
        """The `id`s of the weights to which the pass has written in a way that the recorder can't repeat on other values."""
        self._given: MutableMapping[torch.Tensor, WeightOp] = WeakIdKeyDictionary()
        """The operations whose outputs the model's code now has."""
        self._topk_count = 0
        self._start = torch.zeros((), device=device, requires_grad=True)

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: Arguments = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.requires_grad_ and args[0].grad_fn is not None:
            args[0].retain_grad()  # for the model, which has detached it, it is the start of a graph
            return args[0]
        return super().__torch_function__(func, types, args, kwargs)

    def saving(self) -> AbstractContextManager[object]:
        """Return a context manager for the forward pass. Under it, a graph that is to hold no weights remembers which weights it
        needs instead of their values.
        """
        return saved_tensors_hooks(self._remembered, self._read_again) if self.rereads else nullcontext()

    def _remembered(self, tensor: torch.Tensor) -> KeptTensor | _Remembered:
        found = self._replacing.get(tensor.untyped_storage().data_ptr()) if self._replacing else None
        # The files don't have values that the model has written.
        known = found is not None and found.key not in self.written and version_of(tensor) == found.version
        if found is None or found.dtype != tensor.dtype or not known:
            return KeptTensor.of(tensor) if self.file is None else self.file.keep(tensor, self._block)
        offset = int(tensor.storage_offset())
        return _Remembered(self.weights[found.key], found.index, self._block, tensor.shape, tensor.stride(), offset)

    @property
    def _block(self) -> str:
        return "" if self.visits is None else self.visits.inside

    def _read_again(self, saved: KeptTensor | _Remembered) -> torch.Tensor:
        if isinstance(saved, KeptTensor):
            return value_of(saved) if self.file is None else self.file.load(saved)
        if saved.block:
            self.enter_block(saved.block)
        part = None if saved.index is None else self.part_of(saved.weight, saved.index)
        value = self.value_of(saved.weight, None) if part is None else part
        return value.as_strided(saved.shape, saved.strides, saved.offset)

    @property
    def overwritten(self) -> frozenset[int]:
        """The indexes of the recorded operations whose tensors the model overwrote later."""
        return frozenset(index for index, operation in enumerate(self.operations) if operation.overwritten)

    @property
    def held_bytes(self) -> int:
        """How many bytes the arguments and outputs of the recorded operations take, without weights."""
        held = (tensor.untyped_storage() for operation in self.operations for tensor in operation.held_activations)
        return sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())

    def forget(self) -> None:
        """Release everything that was recorded. An autograd graph of which some backward pass has not run would keep it."""
        self.release()
        for each in (self.operations, self.topk_calls, self.answers):
            each.clear()

    def release(self) -> None:
        """Release the tensors that are needed only during the forward pass. Must be called after it."""
        self._replacing.clear()
        self._given.clear()
        self._made.clear()
        self._by_location.clear()

    def run(self, func: Any, name: str, args: Arguments, kwargs: dict[str, Any]) -> Any:
        written = self.standing_for.get(args[0]) if _writes_first(name, args) else None
        if written is not None and self.written.get(written) is args[0] and written not in self._opaque:
            return self._write(written, func, name, args, kwargs)
        args, kwargs = self.revealed(name, args, kwargs)
        tensors = tensors_in(args, kwargs)
        if any(tensor.grad_fn is not None for tensor in tensors):
            if name == "detach":
                return args[0].view_as(args[0])
            if name in _COPIES_VALUES or "out" in kwargs or (_writes_first(name, args) and self._is_hidden(args[0])):
                self._lose_activations()
                args, kwargs = replace_tensors(args, kwargs, {id(tensor): tensor.detach() for tensor in tensors})
            elif "create_graph" in kwargs:  # the gradient that the model computes depends on activations
                kwargs = {**kwargs, "create_graph": True}
            elif not torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
                with torch.enable_grad():
                    return self._run_recorded(func, name, args, kwargs, tensors)
        return self._run_recorded(func, name, args, kwargs, tensors)

    def _run_recorded(
        self, func: Any, name: str, args: Arguments, kwargs: dict[str, Any], tensors: list[torch.Tensor]
    ) -> Any:
        """Run a call that does not write to a weight, and record it if it uses weights. tensors: all tensors among the
        arguments.
        """
        sources = {id(tensor): source for tensor in tensors if (source := self._source(tensor)) is not None}
        if name == "__getitem__" and id(args[0]) in sources and _is_index(args[1]):
            args, tensors = (args[0], int(args[1])), tensors[:1]  # a function of the weight alone
        replaced = {key: self.weights[key] for tensor in tensors if (key := id(tensor)) in self.replaced}
        if self.rereads and name == "__getitem__" and id(args[0]) in sources:
            part = self.indexed(args, replaced)
            if part is not None:
                return self._note_part(id(args[0]), int(args[1]), part)
        table = id(args[1]) if name == "embedding" and takes_rows(args, kwargs) else 0
        looked_up = table in replaced and table not in self.written
        values = {} if looked_up else self.current_values(replaced, None, name)
        if self.rereads:
            unwritten = {key: value for key, value in values.items() if key not in self.written}
            views = [(value, _View(key, None, value.dtype, version_of(value))) for key, value in unwritten.items()]
            seen = [(tensor, self._views[id(tensor)]) for tensor in tensors if id(tensor) in self._views]
            views += [(tensor, view) for tensor, view in seen if view.key not in self.written]
            self._replacing = {tensor.untyped_storage().data_ptr(): view for tensor, view in views}
        # The memory of these is restored after the pass, but the backward pass needs the values that the operation used.
        read = tensors[1:] if _writes_first(name, args) else tensors
        changed = [tensor for tensor in read if self._opaque and self._is_restored(tensor)]
        values |= {id(tensor): _copied(tensor) for tensor in changed}
        given, given_kwargs = replace_tensors(args, kwargs, values) if values else (args, kwargs)
        compute: Callable[[], Any] = partial(call_mixed, func, name, given, given_kwargs, self)
        if looked_up:  # the copy of a whole table may be larger than all else that the pass needs
            compute = partial(self.rows_of, self.weights[table], args[0])
        if not sources:
            if name == "topk":
                topk_call = record_topk(self._topk_count, given, given_kwargs)
                self.topk_calls += [topk_call] if topk_call is not None else []
                self._topk_count += 1
            return compute()
        try:
            return self._weighted(func, name, args, kwargs, given, compute, sources)
        finally:
            self._replacing.clear()  # a pass that waits for others must not keep a weight in memory

    def _write(self, key: int, func: Any, name: str, args: Arguments, kwargs: dict[str, Any]) -> Any:
        """Run a call that writes to a weight, and return its result. The call is recorded, so that it can be repeated on other
        values of the weight. key: the `id` of the weight's tensor.
        """
        tensor = self.weights[key].tensor
        before = self._source(tensor)
        given = [source for each in tensors_in(args[1:], kwargs) if (source := self._source(each)) is not None]
        self.unfollowed.update(source.weight for source in given)
        found = {id(each): self.weights[id(each)] for each in tensors_in(args[1:], kwargs) if id(each) in self.replaced}
        args, kwargs = replace_tensors(args, kwargs, self.current_values(found, None, name))
        copies = {id(each): _copied(each) for each in tensors_in(args[1:], kwargs)}
        others, other_kwargs = replace_tensors(args[1:], kwargs, copies)

        def remake(value: torch.Tensor) -> torch.Tensor:
            assert before is not None
            changed = before.remake(value).clone()
            call_mixed(func, name, (changed, *others), other_kwargs, self)
            return changed

        if before is not None:
            self._made[key] = tensor, WeightOrigin(before.weight, remake, itself=False, written=True)
        # With gradients, what is written from activations is followed to the weights that they depend on.
        with nullcontext() if torch.is_inference_mode_enabled() else torch.enable_grad():
            return call_mixed(func, name, args, kwargs, self)

    def _before_write(self, args: Arguments, kwargs: dict[str, Any]) -> tuple[Arguments, dict[str, Any]]:
        before = set(self._held)
        new_args, new_kwargs = super()._before_write(args, kwargs)
        base = base_of(args[0]) if args and isinstance(args[0], torch.Tensor) else None
        # The call may write to a part of a weight to which the pass has written before, or to a list of weights.
        part_of = self.standing_for.get(base, 0) if base is not None else 0
        listed = map(id, args[0]) if args and isinstance(args[0], list) else ()
        named = tensors_in((kwargs.get("out"), args[0] if kwargs.get("inplace") else None), {})
        self._hide({part_of, *(self._held.keys() - before), *listed, *map(id, named)})
        return new_args, new_kwargs

    def _set_data(self, key: int, value: torch.Tensor) -> None:
        source = self._source(value)
        if source is not None:
            self.unfollowed.add(source.weight)
        if value.grad_fn is not None:
            self._lose_activations()
        super()._set_data(key, value)
        self._hide({key})

    def _lose_activations(self) -> None:
        """Note that activations act on the output in a way that gradients do not follow, for example through values that the model
        writes into a weight. They may depend on every weight that was used before.
        """
        self.unfollowed.update(weight for operation in self.operations for weight in operation.weights)

    def _is_hidden(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor shares the memory of a weight that is not followed (see `_hide`)."""
        base = base_of(tensor)
        key = self.standing_for.get(tensor if base is None else base)
        return key in self._opaque or self._is_restored(tensor)

    def _is_restored(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor shares the memory of a weight to which the pass has written, and that is restored after it."""
        keys = {id(tensor), *map(id, self.sharing_memory(tensor))}
        return bool(keys & self._opaque) and id(tensor) not in self.written

    def _hide(self, keys: Iterable[int]) -> None:
        """Stop following the weights whose tensors have the `id`s in `keys`, because the pass has changed their memory in an
        unknown way.
        """
        for key in self.weights.keys() & keys:
            name = self.weights[key].info.name
            self._opaque.add(key)
            self.unfollowed.add(name)
            self._made = {each: made for each, made in self._made.items() if made[1].weight != name}

    def read_property(self, func: Any, args: Arguments) -> Any:
        answer = super().read_property(func, args)
        source = self._source(args[0])
        if source is None:
            if func.__self__ is torch.Tensor.data and args[0].grad_fn is not None:
                return args[0].view_as(args[0])
            if func.__self__ is torch.Tensor.dtype and args[0] in self._given:
                self.dtype_read += self._given[args[0]].weights
        elif func.__self__ is torch.Tensor.dtype:
            self._own_dtypes_read.add(source.weight)
        elif func.__self__ in TENSOR_PROPERTIES:
            parent, rest = source.remake, args[1:]
            remade = lambda tensor: func(parent(tensor), *rest)  # noqa: E731
            view = self._views.get(id(args[0]))
            key = id(args[0])
            if self.rereads and view is None and key in self.replaced and key not in self.written:
                view = _View(key, None, answer.dtype, version_of(answer))
            self._note(answer, WeightOrigin(source.weight, remade, False, source.rows), view)
        return answer

    def _source(self, tensor: torch.Tensor) -> WeightOrigin | None:
        key = id(tensor)
        if key not in self._made and key not in self.weights and (place := _location(tensor)) is not None:
            key = self._by_location.get(place, 0)
        known = self._made.get(key)
        if known is not None:
            return known[1]
        weight = self.weights.get(key)
        if weight is None or key in self._opaque or not (weight.info.castable or not weight.reference.plain):
            return None
        return WeightOrigin(weight.info.name, _same, True)

    def _note(self, tensor: torch.Tensor, origin: WeightOrigin, view: _View | None = None) -> None:
        """Remember how a tensor was computed from a weight. view: if the graph holds no weights, and the tensor shares memory with
        a weight's values, whose they are. It is then not kept in memory by this.
        """
        key, place = id(tensor), _location(tensor)
        self._by_location.setdefault(place, key)
        if view is None:
            self._made[key] = tensor, origin
            return
        self._made[key], self._views[key] = (None, origin), view

        def forget() -> None:
            self._made.pop(key, None)
            self._views.pop(key, None)
            if self._by_location.get(place) == key:
                del self._by_location[place]

        weakref.finalize(tensor, forget).atexit = False

    def _note_part(self, key: int, index: int, part: torch.Tensor) -> torch.Tensor:
        """Remember that a tensor has the values of a weight at one index of its first dimension, and return it. key: the `id` of
        the weight's tensor.
        """
        weight = self.weights[key]
        count = weight.stored.shape[0]

        def remake(values: torch.Tensor) -> torch.Tensor:
            return values[index if len(values) == count else 0]

        rows = slice(index, index + 1)
        self._note(
            part, WeightOrigin(weight.info.name, remake, False, rows), _View(key, index, part.dtype, version_of(part))
        )
        return part

    def _weighted(
        self,
        func: Any,
        name: str,
        args: Arguments,
        kwargs: dict[str, Any],
        given: Arguments,
        compute: Callable[[], Any],
        sources: dict[int, WeightOrigin],
    ) -> Any:
        """Run a call that uses weights, record it, and return its result.

        args, kwargs: the arguments of the call, with the module's own tensors. given: its positional arguments with values in place
        of weights. compute: runs the call. sources: as for `_of_one_weight`.
        """
        number = len(self.operations)
        in_place = _writes_first(name, args)
        written = id(args[0]) if in_place else None
        names = {source.weight for source in sources.values()}
        if in_place and written not in sources:
            # The operation will be run again, on the values that its destination has before this call.
            args = (args[0].detach().clone(), *args[1:])
        output = compute()
        results = tensors_in((given[0] if in_place and output is None else output,), {})
        if not in_place and self._of_one_weight(args, kwargs, results, sources):
            self._note_made(func, args, kwargs, output, sources)
            return output
        if written is not None:
            self._made.pop(written, None)  # from now on the tensor is no longer a function of one weight
            self._by_location.pop(_location(given[0]), None)
        floats = [tensor for tensor in results if tensor.is_floating_point()]
        if ("out" in kwargs or not floats) and not isinstance(output, _NO_VALUES):
            if isinstance(output, (bool, int)) and len(tensors_in(args, kwargs)) == len(sources) == 1:
                self.answers.append(ValueRead(func, args, kwargs, next(iter(sources.items())), output))
            else:
                self.unfollowed |= names
        if not floats or not names & self.wanted:
            return output
        # Nothing before the first operations requires a gradient, so adding `_start` (0) makes their outputs require one.
        new = {
            id(tensor): tensor.add_(self._start.to(tensor)) if in_place else tensor + self._start.to(tensor)
            for tensor in floats
            if not tensor.requires_grad
        }
        output = _swapped(output, new)
        tapped = [new.get(id(tensor), tensor) for tensor in floats]
        keep: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach
        if number in self.copies or self._opaque:
            keep = _copied
        activations = {
            id(tensor): keep(self.written.get(id(tensor), tensor))
            for tensor in tensors_in(args, kwargs)
            if id(tensor) not in sources
        }
        stand_ins = self._stand_ins(args, kwargs)
        sources = {id(stand_ins[key]) if key in stand_ins else key: each for key, each in sources.items()}
        outputs, kept = [keep(tensor) for tensor in tapped], dict[int, KeptTensor]()
        if self.file is not None:
            outputs = [self._in_file(tensor, kept) for tensor in outputs]
            activations = {key: self._in_file(tensor, kept) for key, tensor in activations.items()}
        held_args, held_kwargs = replace_tensors(args, kwargs, activations | stand_ins)
        operation = WeightOp(
            func, name, self.module, held_args, held_kwargs, sources, outputs, frozenset(self._own_dtypes_read),
            block=self._block, gradients=[[] for _ in tapped], kept=kept,
        )  # fmt: skip
        self._own_dtypes_read.clear()
        operation.note_versions()
        self.operations.append(operation)
        for index, tensor in enumerate(tapped):
            self._given[tensor] = operation
            if tensor.requires_grad:
                tensor.register_hook(partial(self.on_gradient, operation, index))  # type: ignore[no-untyped-call]
        if not any(tensor.requires_grad for tensor in tapped) or any(unwrapped(tensor)[1] is None for tensor in tapped):
            self.unfollowed |= (
                names  # the model runs this operation without gradients, or in a `torch.func.grad` of its own
            )
        return output

    def _in_file(self, tensor: torch.Tensor, kept: dict[int, KeptTensor]) -> torch.Tensor:
        """Keep an activation in the file, add what stands for it to `kept`, and return a tensor without memory."""
        if self.file is None or not is_keepable(tensor):
            return tensor
        stand_in = torch.empty_like(tensor, device="meta")
        kept[id(stand_in)] = self.file.keep(tensor, self._block)
        return stand_in

    def _of_one_weight(
        self, args: Arguments, kwargs: dict[str, Any], results: list[torch.Tensor], sources: dict[int, WeightOrigin]
    ) -> bool:
        """Return whether a call computed its results from one weight and no other tensor. An example is a view of a weight, or
        `-exp(A)` for a weight A.

        sources: how each argument that comes from a weight was computed, by the `id` of the argument.
        """
        only_weights = all(id(tensor) in sources for tensor in tensors_in(args, kwargs))
        one = len({source.weight for source in sources.values()}) == 1
        return only_weights and one and bool(results) and not any(tensor.requires_grad for tensor in results)

    def _note_made(
        self, func: Any, args: Arguments, kwargs: dict[str, Any], output: Any, sources: dict[int, WeightOrigin]
    ) -> None:
        origin = next(iter(sources.values()))
        stand_ins = self._stand_ins(args, kwargs)
        args, kwargs = replace_tensors(args, kwargs, stand_ins)
        sources = {id(stand_ins[key]) if key in stand_ins else key: each for key, each in sources.items()}

        def remake(index: int | None, tensor: torch.Tensor) -> torch.Tensor:
            parents = {key: source.remake(tensor) for key, source in sources.items()}
            remade_args, remade_kwargs = replace_tensors(args, kwargs, parents)
            made = func(*remade_args, **remade_kwargs)
            result = made if index is None else made[index]
            assert isinstance(result, torch.Tensor)
            return result

        parts = [(None, output)] if isinstance(output, torch.Tensor) else list(enumerate(output))
        for index, part in parts:
            view = self._replacing.get(part.untyped_storage().data_ptr()) if self._replacing else None
            self._note(part, WeightOrigin(origin.weight, partial(remake, index), False, origin.rows), view)

    def _stand_ins(self, args: Arguments, kwargs: dict[str, Any]) -> dict[int, torch.Tensor]:
        """Return tensors without memory, by the `id` of the views of weights' values among the arguments of a call. What is
        recorded of the call has them in place of the views, which are made again when they are needed.
        """
        views = [tensor for tensor in tensors_in(args, kwargs) if id(tensor) in self._views]
        return {id(tensor): torch.empty_like(tensor, device="meta") for tensor in views}


_Place = tuple[int, torch.dtype, torch.Size, tuple[int, ...]]


def _location(tensor: torch.Tensor) -> _Place | None:
    """Return where a tensor's values are in memory (address, dtype, shape and strides), or None if the tensor has no memory of its
    own.
    """
    if tensor.layout is not torch.strided or tensor.is_nested or is_wrapped(tensor) or not tensor.numel():
        return None
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _writes_first(name: str, args: Arguments) -> bool:
    return is_in_place(name) and bool(args) and isinstance(args[0], torch.Tensor)


def _is_index(value: Any) -> bool:
    """Return whether an index is a tensor with one integer."""
    return isinstance(value, torch.Tensor) and not value.ndim and value.dtype in (torch.int32, torch.int64)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _swapped(value: Any, new: Mapping[int, torch.Tensor]) -> Any:
    """Return the output of a torch call in which the tensors whose `id` is a key of `new` are replaced. torch's named tuples become
    plain tuples.
    """
    if not new:
        return value
    if isinstance(value, torch.Tensor):
        return new.get(id(value), value)
    if isinstance(value, (list, tuple)):
        swapped = [_swapped(item, new) for item in value]
        return swapped if isinstance(value, list) else tuple(swapped)
    return value
