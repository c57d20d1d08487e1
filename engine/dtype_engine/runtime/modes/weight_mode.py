"""The base class of the torch-function modes in which forward passes of the reference and the candidate run. It changes plain torch
in two ways:

1. A weight is replaced by other values if the pass can't use it as the module holds it. In a candidate run, these are weights in a
   format with scales, such as float8; in a reference run, weights that are not in the reference's dtype.
2. A call that torch refuses because of its dtypes is repeated with all arguments in one dtype: see `promotion`.

If the model's code writes to a weight, the new values last only until the pass ends. The module then has its previous weights
again, so that all passes start from the same weights.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from enum import Enum
from typing import Any, Self

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from dtype_engine.core.errors import NoForward
from dtype_engine.runtime.formats.dequantize import dtype_name
from dtype_engine.runtime.libraries.torch_private import (
    WeakIdKeyDictionary,
    base_of,
    is_wrapped,
    unwrapped,
    without_dtype_check,
)
from dtype_engine.runtime.model.weight import Weight
from dtype_engine.runtime.modes.activations import Product, WeightProducts
from dtype_engine.runtime.modes.op_tables import (
    METADATA,
    TENSOR_PROPERTIES,
    Arguments,
    is_in_place,
    promoted_dtype,
    recover,
    replace_tensors,
    takes_rows,
    tensors_in,
)
from dtype_engine.runtime.modes.promotion import ImplicitCast, call_mixed
from dtype_engine.runtime.numerics.activations import InputFormat

_FLOATS = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})


class _Kind(Enum):
    """What a torch function does with its first argument."""

    CALL = "an operation"
    WRITE = "an operation that writes to its first argument"
    PROPERTY = "the value of a property"
    SET = "a new value of a property"
    METADATA = "a question about a tensor that no value has part in"
    IS_FLOAT = "the question whether a tensor is of a float dtype"


_BY_NAME = {
    **dict.fromkeys(METADATA, _Kind.METADATA),
    "__get__": _Kind.PROPERTY,
    "__set__": _Kind.SET,
    "is_floating_point": _Kind.IS_FLOAT,
}
_kinds: dict[Any, _Kind] = {}


def _kind_of(func: Any) -> _Kind:
    name: str = func.__name__
    _kinds[func] = kind = _BY_NAME.get(name) or (_Kind.WRITE if is_in_place(name) else _Kind.CALL)
    return kind


class WeightMode(TorchFunctionMode):
    """A torch-function mode that intercepts every torch call of a forward pass and replaces weights by the values of a subclass.

    weights: all weights, keyed by the `id` of the tensor in the module. replaced: the `id`s of the weights to replace.
    """

    def __init__(
        self,
        weights: Mapping[int, Weight],
        device: torch.device,
        replaced: Iterable[int] = (),
        compute: torch.dtype = torch.float32,
        rounding: WeightProducts[Any] | None = None,
    ) -> None:
        super().__init__()
        self.weights = weights
        self.device = device
        """The device on which the forward pass runs."""
        self.compute = compute
        """The dtype to which a weight in a format with scales is dequantized for an operation without an activation."""
        self.rounding = rounding
        """What gets the inputs of products with weights, such as an `ActivationRounding`, or None."""
        self.record: Callable[[ImplicitCast], None] | None = None
        """A function that is called with every implicit cast, or None if casts are not recorded."""
        self.requiring_grad = False
        """Whether values that replace a weight require gradients, as the weight in plain torch does (`Weight.requires_grad`)."""
        self.added = False
        """Whether the forward pass did more than plain torch would: it dequantized a weight, or cast the arguments of a call."""
        self.module = ""
        """The dotted name of the running module, which the code that runs the pass sets."""
        self.finished = 0
        """The number of module calls that have ended, which the code that runs the pass sets."""
        self.kept: Sequence[torch.Tensor] = ()
        """Tensors of the model, except weights, whose values are restored after the forward pass if it changes them."""
        self.first_use: dict[int, int] = {}
        """How many module calls had ended before a weight was first used, keyed by the `id` of the weight's tensor."""
        self.operation = ""
        """The running operation, for the record of casts inside it. "" if the code casts explicitly, with a `dtype` argument."""
        self.replaced = set(replaced)
        self._narrow = frozenset(weights[key].tensor.dtype for key in self.replaced) - {torch.float32, torch.float64}
        """The dtypes, except float32 and float64, of the weights to replace. Another tensor in one of these dtypes may share the
        memory of such a weight, so `revealed` examines it.
        """
        self.written: dict[int, torch.Tensor] = {}
        """The current values of the weights that the model's code has changed in this forward pass, keyed by `id`."""
        self.standing_for: MutableMapping[torch.Tensor, int] = WeakIdKeyDictionary()
        """Maps each tensor that replaces a weight, or is a view of such a replacement, to the `id` of this weight."""
        self.old_values: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By `id`: (weight or tensor in `kept` that the pass has changed through a view, copy of its old values to restore)."""
        self._addresses: list[tuple[int, int, torch.Tensor]] | None = None

    @property
    def wrote(self) -> bool:
        """Whether the forward pass has changed a weight or one of the tensors in `kept`."""
        return bool(self.written or self.old_values)

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        without_dtype_check.__enter__()  # whether torch takes an input is asked of torch
        return self

    def __exit__(self, *exception: Any) -> None:
        without_dtype_check.__exit__()
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        for data, before in self.old_values.values():
            data.copy_(before)

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: Arguments = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if kwargs is None:
            kwargs = {}
        kind = _kinds.get(func) or _kind_of(func)
        if kind is _Kind.CALL and kwargs.get("max_norm") is not None:
            kwargs = self._renormalized(types, args, kwargs)
        if kind is _Kind.CALL and "out" not in kwargs and not kwargs.get("inplace"):
            return self.run(func, func.__name__, args, kwargs)
        if kind is _Kind.PROPERTY:
            return self.read_property(func, args)
        if kind is _Kind.CALL or kind is _Kind.WRITE:
            if not args and "tensor" in kwargs:  # a function of torch.nn.init
                args, kwargs = (kwargs["tensor"],), {name: value for name, value in kwargs.items() if name != "tensor"}
            args, kwargs = self._before_write(args, kwargs)
            output = self.run(func, func.__name__, args, kwargs)
            key = self.standing_for.get(output) if isinstance(output, torch.Tensor) else None
            # `module.weight *= 2` assigns the result to the module, which must keep its own tensor.
            return output if key is None or self.written.get(key) is not output else self.weights[key].tensor
        key = id(args[0])
        for given in args:
            if id(given) in self.weights:
                self.note_use(id(given))  # the answer may reveal the dtype
        if kind is _Kind.SET and func.__self__ is torch.Tensor.data and key in self.weights:
            self._set_data(key, args[1])
            return None
        if kind is _Kind.IS_FLOAT and key in self.replaced:
            return True
        if func is torch.Tensor.requires_grad_:
            self.revealed("torch.func.grad", args, {})
        return func(*args, **kwargs)

    def _renormalized(self, types: Iterable[type], args: Arguments, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Rescale the rows that an embedding look-up with `max_norm` selects, by a call that writes to the table. Returns the
        keyword arguments with None as `max_norm`.
        """
        ids, table = args[:2]
        given = table, ids.contiguous(), kwargs["max_norm"], kwargs.get("norm_type", 2.0)
        with torch.no_grad():  # torch has no gradient of this call
            self.__torch_function__(torch.embedding_renorm_, types, given)
        return kwargs | {"max_norm": None}

    def run(self, func: Any, name: str, args: Arguments, kwargs: dict[str, Any]) -> Any:
        """Call a torch function and return its result, after replacing weights among the arguments and making dtypes equal where
        needed. Nearly all of the thousands of calls of a pass have arguments of one dtype and no weight to replace, and run
        unchanged. name: the function's `__name__`, such as "linear".
        """
        as_given, dtype = self.rounding is None and self.record is None, None
        values = [*args, *kwargs.values()]
        for value in values:
            if isinstance(value, torch.Tensor):
                key = id(value)
                if key in self.weights:
                    self.first_use.setdefault(key, self.finished)
                    if key in self.replaced:
                        as_given = False
                own = value.dtype
                if own in self._narrow and key not in self.weights:
                    as_given = False
                if own is not dtype and own in _FLOATS:
                    if dtype is not None:
                        as_given = False
                    dtype = own
            elif isinstance(value, (list, tuple)):
                values += value  # the loop also visits items that are appended meanwhile
            elif isinstance(value, dict):
                as_given = False
        if not as_given:
            return self._run(func, name, args, kwargs)
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            return recover(func, name, args, kwargs, self, error)

    def note_use(self, key: int) -> None:
        """Record the first use of a weight in this forward pass. key: the `id` of the weight's tensor."""
        self.first_use.setdefault(key, self.finished)

    def read_property(self, func: Any, args: Arguments) -> Any:
        """Return a property such as `tensor.dtype` or `tensor.T`. For a replaced weight, return the property of the replacement."""
        key = id(args[0])
        weight = self.weights.get(key)
        if weight is not None:
            self.note_use(key)
            if func.__self__ is torch.Tensor.dtype:
                return self._dtype_of(key, weight) if key in self.replaced else func(*args)
        if func.__self__ not in TENSOR_PROPERTIES or (key not in self.replaced and self.rounding is None):
            return func(*args)
        if key not in self.replaced:
            answer = func(*args)
        else:
            answer = func(self._value(key), *args[1:])
            self.standing_for[answer] = key
        if self.rounding is not None:
            quantized = {key: form} if weight is not None and (form := self.input_format(weight)) else {}
            self.rounding.follow(answer, [args[0]], self.rounding.formats([args[0]], quantized))
        return answer

    def _dtype_of(self, key: int, weight: Weight) -> torch.dtype:
        return self.written[key].dtype if key in self.written else self.dtype_of(weight)

    def like_reference(self, module: str) -> bool:
        """Return whether a module ("" for the model) runs with the settings of the reference in this pass, such as its `eps`."""
        return False

    def dtype_of(self, weight: Weight) -> torch.dtype:
        """Return the dtype that the model's code gets when it reads the `dtype` of a replaced weight."""
        return self.compute

    def value_of(self, weight: Weight, dtype: torch.dtype | None) -> torch.Tensor:
        """Return the values that replace a weight. dtype: the dtype of the activation in the same operation, or None."""
        raise NotImplementedError

    def values_of(self, weights: Sequence[Weight], dtype: torch.dtype | None, name: str) -> list[torch.Tensor]:
        """Return `value_of` for each of the weights of one operation. name: the operation, such as "linear"."""
        return [self.value_of(weight, dtype) for weight in weights]

    def rows_of(self, weight: Weight, ids: torch.Tensor) -> torch.Tensor:
        """Return rows of the values that replace an embedding table, without computing other rows: [*ids.shape, width]."""
        raise NotImplementedError

    def part_of(self, weight: Weight, index: int) -> torch.Tensor | None:
        """Return `value_of` a weight at one index of its first dimension, or None if this part can't be computed alone."""
        return None

    def is_quantized(self, weight: Weight) -> bool:
        """Return whether a weight is in a format with scales in this pass, such as float8."""
        return False

    def input_format(self, weight: Weight) -> Any:
        """Return how activations that this weight multiplies are rounded if the run settings request it (an `InputFormat`), or
        None: the weight's label for `rounding`.
        """
        return InputFormat(weight.dtype) if self.is_quantized(weight) else None

    def is_weight(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor, also inside `torch.vmap`, is a weight, replaces a weight, is a view of such a tensor, or shares
        a weight's memory. The last case covers `weight.data`, `weight.detach()` and the tensors of `state_dict()`, which torch does
        not regard as views.
        """
        tensor, _ = unwrapped(tensor)
        if isinstance(tensor, nn.Parameter):
            return True  # a parameter that the model created during the pass
        base = base_of(tensor)
        if any(id(each) in self.weights or each in self.standing_for for each in (tensor, base) if each is not None):
            return True
        return any(id(each) in self.weights for each in self.sharing_memory(tensor))

    def _run(self, func: Any, name: str, args: Arguments, kwargs: dict[str, Any]) -> Any:
        """Call a torch function for `run` if a plain call may not do, because a weight may have to be replaced, dtypes differ, or
        casts or quantized weights are tracked.
        """
        args, kwargs = self.revealed(name, args, kwargs)
        tensors = tensors_in(args, kwargs)
        for tensor in tensors:
            if id(tensor) in self.weights:
                self.note_use(id(tensor))
        found = {key: self.weights[key] for tensor in tensors if (key := id(tensor)) in self.replaced}
        if self.rounding is None:
            return self._with_values(func, name, args, kwargs, tensors, found, None)
        weights = [weight for tensor in tensors if (weight := self.weights.get(id(tensor))) is not None]
        quantized = {id(weight.tensor): form for weight in weights if (form := self.input_format(weight))}
        formats = self.rounding.formats(tensors, quantized)
        rounds = self.rounding.wanted(name, args, kwargs, formats) if formats else None
        output = self._with_values(func, name, args, kwargs, tensors, found, rounds)
        if formats and name != "embedding":  # an embedding returns activations, not weights
            self.rounding.follow(output, tensors, formats)
        return output

    def revealed(self, name: str, args: Arguments, kwargs: dict[str, Any]) -> tuple[Arguments, dict[str, Any]]:
        """Return the arguments of a torch call with hidden weights replaced by values.

        A hidden weight is a tensor that shares the memory of a weight to replace, but was made in a way that the mode did not see,
        for example by `torch.vmap` or `nn.Parameter(weight)`. Raises NoForward if the tensor is only a part of the weight, or is
        wrapped by a transform other than `torch.vmap`, such as `torch.func.grad`.
        """
        if not self._narrow:
            return args, kwargs
        tensors, new = tensors_in(args, kwargs), {}
        for tensor in tensors:
            weight = self._hidden_weight(tensor)
            if weight is None:
                continue
            inner, wrap = unwrapped(tensor)
            self.note_use(id(weight))
            found = {id(weight): self.weights[id(weight)]}
            others = [each for each in tensors if each.dtype not in self._narrow]
            value = self.current_values(found, self._activation_dtype(others), name)[id(weight)]
            if unwrapped(value)[0].data_ptr() == weight.data_ptr():
                continue  # here the pass uses the weight as the module holds it
            if wrap is None or not _same_elements(inner, weight):
                raise NoForward(
                    f"{self.module or 'the model'} gives {found[id(weight)].info.name} to {name} in a way in which its values "
                    f"in {dtype_name(inner.dtype)} can't be replaced; the model runs only with this weight in float32"
                )
            new[id(tensor)] = wrap(value)
            if self.rounding is not None and self.input_format(self.weights[id(weight)]):
                self.rounding.left_wide.add(name)
            self.added = True
        return replace_tensors(args, kwargs, new)

    def _hidden_weight(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the weight to replace whose memory a tensor shares, of which the mode did not see it made, or None."""
        if tensor.dtype not in self._narrow or id(tensor) in self.weights:
            return None
        if tensor in self.standing_for or base_of(tensor) in self.standing_for:
            return None
        return next((each for each in self.sharing_memory(unwrapped(tensor)[0]) if id(each) in self.replaced), None)

    def _with_values(
        self,
        func: Any,
        name: str,
        args: Arguments,
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
        found: Mapping[int, Weight],
        rounds: Product[Any] | None,
    ) -> Any:
        """Call a torch function with values instead of the weights in `found`, and with one operand rounded by `rounds`."""
        if found:
            self.added = True
            table = id(args[1]) if name == "embedding" and takes_rows(args, kwargs) else 0
            if table in found and table not in self.written:
                return self.rows_of(found[table], args[0])
            if name == "__getitem__" and (part := self.indexed(args, found)) is not None:
                return part
            args, kwargs = replace_tensors(
                args, kwargs, self.current_values(found, self._activation_dtype(tensors), name)
            )
        if rounds is not None:
            args, kwargs = self._rounded(name, args, kwargs, rounds)
        self.operation = name if kwargs.get("dtype") is None else ""
        try:
            output = call_mixed(func, name, args, kwargs, self)
        finally:
            self.operation = ""
        # What `detach` returns shares memory with the value, too, but torch does not take it for a view.
        if len(found) == 1 and isinstance(output, torch.Tensor) and (base_of(output) is not None or name == "detach"):
            self.standing_for[output] = next(iter(found))
        return output

    def indexed(self, args: Arguments, found: Mapping[int, Weight]) -> torch.Tensor | None:
        key, index = id(args[0]), args[1]
        if isinstance(index, torch.Tensor) and not index.ndim and not index.is_floating_point():
            index = int(index)
        if key not in found or key in self.written or type(index) is not int:
            return None
        part = self.part_of(found[key], index)
        if part is not None:
            self.standing_for[part] = key
        return part

    def _activation_dtype(self, tensors: Sequence[torch.Tensor]) -> torch.dtype | None:
        floats = [tensor for tensor in tensors if tensor.is_floating_point() and not self.is_weight(tensor)]
        return promoted_dtype([tensor for tensor in floats if tensor.ndim] or floats) if floats else None

    def current_values(
        self, found: Mapping[int, Weight], dtype: torch.dtype | None, name: str
    ) -> dict[int, torch.Tensor]:
        """Return the values with which one operation computes instead of the weights in `found`, both keyed by `id`. If the model's
        code has written to a weight in this forward pass, the written values are returned. dtype: the dtype of the activation in
        the operation, or None. name: the operation, such as "linear".
        """
        held = {key: weight for key, weight in found.items() if key not in self.written}
        values = dict(zip(held, self.values_of(list(held.values()), dtype, name), strict=True))
        # torch.func.grad, which enables gradients, allows no `requires_grad_`.
        requiring_grad = self.requiring_grad and not torch.is_grad_enabled()
        for key, value in values.items():
            if requiring_grad and found[key].requires_grad and value.is_floating_point():
                value = values[key] = value.detach().requires_grad_()
            self.standing_for[value] = key
        for key in found.keys() - held.keys():
            value = self.written[key]
            values[key] = value if dtype is None or not self.is_quantized(found[key]) else value.to(dtype)
        return values

    def _value(self, key: int) -> torch.Tensor:
        return self.current_values({key: self.weights[key]}, None, "")[key]

    def _rounded(
        self, name: str, args: Arguments, kwargs: dict[str, Any], rounds: Product[Any]
    ) -> tuple[Arguments, dict[str, Any]]:
        assert self.rounding is not None
        self.added = True
        kind = self.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        args, kwargs, before = self.rounding.apply(name, args, kwargs, rounds, dtype)
        if self.record is not None:
            self.record(
                ImplicitCast(self.module, name, dtype_name(before.dtype), rounds.form.name, before.numel(), False)
            )
        return args, kwargs

    def _before_write(self, args: Arguments, kwargs: dict[str, Any]) -> tuple[Arguments, dict[str, Any]]:
        """Return new arguments for a torch call that writes to its first argument or to `out`. Instead of a weight, the call gets a
        copy, which replaces the weight for the rest of the forward pass. If the call writes to a tensor that shares memory with a
        weight, the weight's values are saved, and restored after the pass.
        """
        destination = kwargs.get("out", args[0] if args else None)
        new: dict[int, torch.Tensor] = {}
        for each in tensors_in((destination,), {}):
            hidden = self._hidden_weight(each)
            if id(each) in self.weights:
                new[id(each)] = self._written_copy(each)
            elif hidden is not None and not is_wrapped(each) and _same_elements(each, hidden):
                new[id(each)] = self._written_copy(hidden)
            else:
                self._keep_shared(each)
        return replace_tensors(args, kwargs, new)

    def _written_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        key = id(tensor)
        self.note_use(key)
        if key not in self.written:
            value = self._value(key) if key in self.replaced else tensor.data
            self.written[key] = value.clone()
            self.standing_for[self.written[key]] = key
            self.replaced.add(key)
        return self.written[key]

    def _keep_shared(self, destination: torch.Tensor) -> None:
        base = base_of(destination)
        owner = destination if base is None else base
        given = self.standing_for.get(owner, self.standing_for.get(destination))
        if given is not None:
            original = self.weights[given].reference.held(torch.device("cpu"))
            if original.untyped_storage().data_ptr() == owner.untyped_storage().data_ptr():
                self.old_values.setdefault(given, (original, original.clone()))
            self.written.setdefault(given, owner)
            self.replaced.add(given)
            return
        for shared in self.sharing_memory(destination):
            if id(shared) not in self.old_values:
                self.old_values[id(shared)] = shared.data, shared.data.clone()

    def _set_data(self, key: int, value: torch.Tensor) -> None:
        """Replace the weight with the `id` `key` by `value` for the rest of the pass: the model's code has assigned to `data`."""
        if id(value) in self.replaced:
            value = self._value(id(value))
        value = value.detach()
        self.written[key] = value.clone() if next(self.sharing_memory(value), None) is not None else value
        self.standing_for[self.written[key]] = key
        self.replaced.add(key)

    def sharing_memory(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        if self._addresses is None:
            lasting = [*(weight.tensor for weight in self.weights.values()), *self.kept]
            self._addresses = sorted(((*_span(each), each) for each in lasting), key=lambda span: span[:2])
        start, end = _span(tensor)
        for index in range(bisect_left(self._addresses, end, key=lambda span: span[0]) - 1, -1, -1):
            _, last, lasting_tensor = self._addresses[index]
            if last <= start:
                return
            yield lasting_tensor


def _same_elements(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Return whether two tensors with memory consist of the same elements in the same order."""
    return (one.shape, one.stride(), one.data_ptr()) == (two.shape, two.stride(), two.data_ptr())


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and of the byte after its last one, or (0, 0) if it has no memory."""
    if not tensor.numel() or tensor.layout is not torch.strided or is_wrapped(tensor):
        return 0, 0
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (steps + 1) * tensor.element_size()
