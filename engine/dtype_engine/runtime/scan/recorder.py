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

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from dtype_engine.runtime.libraries.torch_private import WeakIdKeyDictionary, base_of, unwrapped, version_of
from dtype_engine.runtime.model.live import LiveModel
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
from dtype_engine.runtime.scan.graph_memory import GraphMemory, WeightView
from dtype_engine.runtime.scan.kept_tensors import KeptTensor
from dtype_engine.runtime.scan.routing import TopKCall, record_topk
from dtype_engine.runtime.scan.weight_ops import ValueRead, WeightOp, WeightOrigin
from dtype_engine.runtime.scan.weight_origins import WeightOrigins

_COPIES_VALUES = frozenset({"numpy", "__array__", "__dlpack__", "__deepcopy__", "__reduce_ex__"})
"""Methods that torch refuses for a tensor with an autograd graph, which activations have only in a scan. It also refuses `out=`."""
_NO_VALUES = (str, torch.dtype, torch.Size, torch.device, type(None))
"""Types of results that say nothing about a weight's values. An operation that returns one does not make a weight `unfollowed`."""


class WeightOpRecorder(ReferenceMode):
    """Runs the reference with an autograd graph, and records every operation that uses a weight in `wanted`.

    copies: the indexes, in the order of the pass, of operations whose tensors are copied, because the model overwrites them
    later. on_gradient: called in the backward pass as `on_gradient(operation, index of the output, gradient)`. memory: keeps what
    the backward passes need.
    """

    def __init__(
        self,
        model: LiveModel,
        wanted: frozenset[str],
        on_gradient: Callable[[WeightOp, int, torch.Tensor], None],
        copies: frozenset[int],
        memory: GraphMemory,
    ) -> None:
        super().__init__(model.by_id, model.device)
        self.memory = memory
        self.origins = WeightOrigins(model.by_id, self.replaced)
        self.operations: list[WeightOp] = []
        self.wanted = wanted
        self.on_gradient = on_gradient
        self.copies = copies
        self.topk_calls: list[TopKCall] = []
        self.dtype_read: list[str] = []
        self.unfollowed: set[str] = set()
        self.answers: list[ValueRead] = []
        """The truth values and integers that the model's code has read and that were computed from one weight each."""
        self._own_dtypes_read: set[str] = set()
        """The weights whose `dtype` the model's code has read since the last recorded operation."""
        self._given: MutableMapping[torch.Tensor, WeightOp] = WeakIdKeyDictionary()
        """Maps each output that the model's code still holds to the operation that returned it."""
        self._topk_count = 0
        self._start = torch.zeros((), device=model.device, requires_grad=True)

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: Arguments = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.requires_grad_ and args[0].grad_fn is not None:
            args[0].retain_grad()  # for the model, which has detached it, it is the start of a graph
            return args[0]
        return super().__torch_function__(func, types, args, kwargs)

    @property
    def overwritten(self) -> frozenset[int]:
        """The indexes of the recorded operations whose tensors the model overwrote later."""
        return frozenset(index for index, operation in enumerate(self.operations) if operation.overwritten)

    @property
    def held_bytes(self) -> int:
        held = (tensor.untyped_storage() for operation in self.operations for tensor in operation.held_activations)
        return sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())

    def forget(self) -> None:
        """Free everything that was recorded. Otherwise, an autograd graph would keep it if some backward passes have not run."""
        self.release()
        for each in (self.operations, self.topk_calls, self.answers):
            each.clear()

    def release(self) -> None:
        """Free the tensors that only the forward pass needs."""
        self._given.clear()
        self.origins.release()

    def run(self, func: Any, name: str, args: Arguments, kwargs: dict[str, Any]) -> Any:
        written = self.standing_for.get(args[0]) if _writes_first(name, args) else None
        if written is not None and self.written.get(written) is args[0] and written not in self.origins.hidden:
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
        """Run a call that writes to no weight, and record it if it uses weights. tensors: all tensors among the arguments."""
        sources = self.origins.among(tensors)
        if name == "__getitem__" and id(args[0]) in sources and _is_index(args[1]):
            args, tensors = (args[0], int(args[1])), tensors[:1]  # a function of the weight alone
        replaced = {key: self.weights[key] for tensor in tensors if (key := id(tensor)) in self.replaced}
        if self.memory.rereads and name == "__getitem__" and id(args[0]) in sources:
            part = self.indexed(args, replaced)
            if part is not None:
                self.origins.note_part(id(args[0]), int(args[1]), part)
                return part
        table = id(args[1]) if name == "embedding" and takes_rows(args, kwargs) else 0
        looked_up = table in replaced and table not in self.written
        values = {} if looked_up else self.current_values(replaced, None, name)
        views = self._views(tensors, values) if self.memory.rereads else []
        # The memory of these is restored after the pass, but the backward pass needs the values that the operation used.
        read = tensors[1:] if _writes_first(name, args) else tensors
        changed = [tensor for tensor in read if self.origins.hidden and self._is_restored(tensor)]
        values |= {id(tensor): _copied(tensor) for tensor in changed}
        given, given_kwargs = replace_tensors(args, kwargs, values) if values else (args, kwargs)
        compute: Callable[[], Any] = partial(call_mixed, func, name, given, given_kwargs, self)
        if looked_up:  # the copy of a whole table may be larger than all else that the pass needs
            compute = partial(self.rows_of, self.weights[table], args[0])
        if not sources and name == "topk":
            topk_call = record_topk(self._topk_count, given, given_kwargs)
            self.topk_calls += [topk_call] if topk_call is not None else []
            self._topk_count += 1
        with self.memory.using(views):
            if not sources:
                return compute()
            call = WeightOp(func, name, self.module, args, kwargs, sources, block=self.memory.block)
            return self._weighted(call, given, compute)

    def _views(
        self, tensors: list[torch.Tensor], values: Mapping[int, torch.Tensor]
    ) -> list[tuple[torch.Tensor, WeightView]]:
        """Return pairs (values of a weight with which a call computes, their `WeightView`), without weights that were written."""
        read = [(value, WeightView(key, None, value.dtype, version_of(value))) for key, value in values.items()]
        seen = self.origins.views
        read += [(tensor, seen[id(tensor)]) for tensor in tensors if id(tensor) in seen]
        return [(tensor, view) for tensor, view in read if view.key not in self.written]

    def _write(self, key: int, func: Any, name: str, args: Arguments, kwargs: dict[str, Any]) -> Any:
        """Run a call that writes to the weight whose tensor has the `id` `key`, and record how to repeat it on other values."""
        before = self.origins.of(self.weights[key].tensor)
        read = tensors_in(args[1:], kwargs)
        self.unfollowed.update(source.weight for source in self.origins.among(read).values())
        found = {id(each): self.weights[id(each)] for each in read if id(each) in self.replaced}
        args, kwargs = replace_tensors(args, kwargs, self.current_values(found, None, name))
        copies = {id(each): _copied(each) for each in tensors_in(args[1:], kwargs)}
        others, other_kwargs = replace_tensors(args[1:], kwargs, copies)

        def remake(value: torch.Tensor) -> torch.Tensor:
            assert before is not None
            changed = before.remake(value).clone()
            call_mixed(func, name, (changed, *others), other_kwargs, self)
            return changed

        if before is not None:
            self.origins.note_written(key, before.weight, remake)
        # With gradients, what is written from activations is followed to the weights that they depend on.
        with nullcontext() if torch.is_inference_mode_enabled() else torch.enable_grad():
            return call_mixed(func, name, args, kwargs, self)

    def _before_write(self, args: Arguments, kwargs: dict[str, Any]) -> tuple[Arguments, dict[str, Any]]:
        before = set(self.old_values)
        new_args, new_kwargs = super()._before_write(args, kwargs)
        base = base_of(args[0]) if args and isinstance(args[0], torch.Tensor) else None
        # The call may write to a part of a weight to which the pass has written before, or to a list of weights.
        part_of = self.standing_for.get(base, 0) if base is not None else 0
        listed = map(id, args[0]) if args and isinstance(args[0], list) else ()
        named = tensors_in((kwargs.get("out"), args[0] if kwargs.get("inplace") else None), {})
        self._hide({part_of, *(self.old_values.keys() - before), *listed, *map(id, named)})
        return new_args, new_kwargs

    def _set_data(self, key: int, value: torch.Tensor) -> None:
        source = self.origins.of(value)
        if source is not None:
            self.unfollowed.add(source.weight)
        if value.grad_fn is not None:
            self._lose_activations()
        super()._set_data(key, value)
        self._hide({key})

    def _lose_activations(self) -> None:
        """Note that activations act on the output without gradients, so that all weights used before count as unfollowed."""
        self.unfollowed.update(weight for operation in self.operations for weight in operation.weights)

    def _is_hidden(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor shares the memory of a weight that is no longer followed (see `_hide`)."""
        base = base_of(tensor)
        key = self.standing_for.get(tensor if base is None else base)
        return key in self.origins.hidden or self._is_restored(tensor)

    def _is_restored(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor shares the memory of a weight to which the pass has written, and which is restored after the
        pass.
        """
        keys = {id(tensor), *map(id, self.sharing_memory(tensor))}
        return bool(keys & self.origins.hidden) and id(tensor) not in self.written

    def _hide(self, keys: set[int]) -> None:
        """Stop following the weights with the `id`s `keys`, because the pass has changed their memory in an unknown way."""
        self.unfollowed |= self.origins.hide(keys)

    def read_property(self, func: Any, args: Arguments) -> Any:
        answer = super().read_property(func, args)
        source = self.origins.of(args[0])
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
            key = id(args[0])
            view = self.origins.views.get(key)
            if self.memory.rereads and view is None and key in self.replaced and key not in self.written:
                view = WeightView(key, None, answer.dtype, version_of(answer))
            self.origins.note(answer, WeightOrigin(source.weight, remade, False, source.rows), view)
        return answer

    def _weighted(self, call: WeightOp, given: Arguments, compute: Callable[[], Any]) -> Any:
        """Run a call that uses weights (by `compute`), and record it. given: its positional arguments with values in place of
        weights.
        """
        in_place = _writes_first(call.name, call.args)
        written = id(call.args[0]) if in_place else None
        if in_place and written not in call.sources:
            # The operation will be run again, on the values that its destination has before this call.
            call.args = (call.args[0].detach().clone(), *call.args[1:])
        output = compute()
        results = tensors_in((given[0] if in_place and output is None else output,), {})
        if not in_place and _of_one_weight(call, results):
            self._note_made(call, output)
            return output
        if written is not None:
            self.origins.forget(written, given[0])
        floats = [tensor for tensor in results if tensor.is_floating_point()]
        if ("out" in call.kwargs or not floats) and not isinstance(output, _NO_VALUES):
            self._note_read(call, output)
        if not floats or self.wanted.isdisjoint(call.weights):
            return output
        # Nothing before the first operations requires a gradient, so adding `_start` (0) makes their outputs require one.
        new = {
            id(tensor): tensor.add_(self._start.to(tensor)) if in_place else tensor + self._start.to(tensor)
            for tensor in floats
            if not tensor.requires_grad
        }
        self._record(call, [new.get(id(tensor), tensor) for tensor in floats])
        return _swapped(output, new)

    def _note_read(self, call: WeightOp, answer: object) -> None:
        """Note that a call has given the model's code values of weights, or a result (`answer`) computed from these values."""
        if isinstance(answer, (bool, int)) and len(tensors_in(call.args, call.kwargs)) == len(call.sources) == 1:
            self.answers.append(ValueRead(call.func, call.args, call.kwargs, next(iter(call.sources.items())), answer))
        else:
            self.unfollowed.update(call.weights)

    def _record(self, call: WeightOp, results: list[torch.Tensor]) -> None:
        """Store a call with its arguments and its floating-point results, which receive gradients in the backward passes."""
        copied = len(self.operations) in self.copies or self.origins.hidden
        keep: Callable[[torch.Tensor], torch.Tensor] = _copied if copied else torch.Tensor.detach
        activations = {id(tensor): keep(self.written.get(id(tensor), tensor)) for tensor in call.activations}
        kept = dict[int, KeptTensor]()
        outputs = [self.memory.keep(keep(tensor), kept) for tensor in results]
        held = {key: self.memory.keep(tensor, kept) for key, tensor in activations.items()}
        operation = call.with_stand_ins(self.origins.stand_ins(call.args, call.kwargs))
        args, kwargs = replace_tensors(operation.args, operation.kwargs, held)
        read, self._own_dtypes_read = frozenset(self._own_dtypes_read), set()
        gradients: list[list[tuple[int, torch.Tensor]]] = [[] for _ in results]
        operation = replace(
            operation, args=args, kwargs=kwargs, outputs=outputs, dtypes_read=read, gradients=gradients, kept=kept
        )
        self.operations.append(operation)
        for index, tensor in enumerate(results):
            self._given[tensor] = operation
            if tensor.requires_grad:
                tensor.register_hook(partial(self.on_gradient, operation, index))  # type: ignore[no-untyped-call]
        if not any(tensor.requires_grad for tensor in results) or any(unwrapped(each)[1] is None for each in results):
            # The model runs this operation without gradients, or in a `torch.func.grad` of its own.
            self.unfollowed.update(call.weights)

    def _note_made(self, call: WeightOp, output: Any) -> None:
        origin = next(iter(call.sources.values()))
        made_by = call.with_stand_ins(self.origins.stand_ins(call.args, call.kwargs))
        func, args, kwargs, sources = made_by.func, made_by.args, made_by.kwargs, made_by.sources

        def remake(index: int | None, tensor: torch.Tensor) -> torch.Tensor:
            parents = {key: source.remake(tensor) for key, source in sources.items()}
            remade_args, remade_kwargs = replace_tensors(args, kwargs, parents)
            made = func(*remade_args, **remade_kwargs)
            result = made if index is None else made[index]
            assert isinstance(result, torch.Tensor)
            return result

        parts = [(None, output)] if isinstance(output, torch.Tensor) else list(enumerate(output))
        for index, part in parts:
            made_so = WeightOrigin(origin.weight, partial(remake, index), False, origin.rows)
            self.origins.note(part, made_so, self.memory.view_of(part))


def _of_one_weight(call: WeightOp, results: list[torch.Tensor]) -> bool:
    """Return whether a call computed its results from one weight alone, such as a view of a weight, or `-exp(A)` for a weight A."""
    only = not call.activations and len(call.weights) == 1
    return only and bool(results) and not any(tensor.requires_grad for tensor in results)


def _writes_first(name: str, args: Arguments) -> bool:
    return is_in_place(name) and bool(args) and isinstance(args[0], torch.Tensor)


def _is_index(value: Any) -> bool:
    """Return whether an index is a tensor with one integer."""
    return isinstance(value, torch.Tensor) and not value.ndim and value.dtype in (torch.int32, torch.int64)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _swapped(value: Any, new: Mapping[int, torch.Tensor]) -> Any:
    """Return the output of a torch call with some tensors replaced. new: the replacements, by the `id` of the old tensor. torch's
    named tuples become plain tuples.
    """
    if not new:
        return value
    if isinstance(value, torch.Tensor):
        return new.get(id(value), value)
    if isinstance(value, (list, tuple)):
        swapped = [_swapped(item, new) for item in value]
        return swapped if isinstance(value, list) else tuple(swapped)
    return value
