"""Running a module whose weights are in any mix of dtypes, without changing the module.

PyTorch does not promote in matrix products: `Linear(float16)` on a float32 input raises. So the forward pass
runs under a `TorchFunctionMode` that sees every torch call, with four rules:

1. an operation that takes a weight (a parameter, a persistent buffer, or a view of one) computes in that
   weight's dtype; of several, the largest decides (`torch.promote_types`);
2. an operation without a weight whose float arguments differ computes in `torch.promote_types` of them;
3. an in-place operation keeps its destination's dtype;
4. a storage-only weight is brought back to the activation's dtype, or, where there is none (an embedding
   look-up), to the compute dtype.

Wherever torch itself would have run an operation on a module in one dtype, the result is torch's own.
The reference runs under `ReferenceMode`: the weights as stored, each widened to float32 as it is used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dtype_engine.core.errors import KernelError
from dtype_engine.runtime.model.live import Weight
from dtype_engine.runtime.numerics.quantize import dequantize, dtype_name

Arguments = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class ImplicitCast:
    """One tensor that changed dtype on its way into an operation. `torch_raises`: plain torch would have refused."""

    module: str
    operation: str
    source: str
    target: str
    elements: int
    torch_raises: bool


# Questions about a tensor that no value has part in: answered by the tensor as it is.
_METADATA = frozenset(
    {
        "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "is_contiguous",
        "element_size", "data_ptr", "get_device", "is_set_to", "is_complex", "is_inference", "is_pinned",
        "is_shared", "untyped_storage", "requires_grad_", "register_hook", "__len__", "__hash__", "__repr__",
        "__format__", "is_same_size", "has_names", "refine_names", "is_conj", "is_neg", "is_nonzero",
        "is_tensor", "result_type", "can_cast",
    }
)  # fmt: skip
# The model's own, explicit casts and constructors: what they give is what the model asked for.
_EXPLICIT = frozenset(
    {
        "to", "type", "type_as", "float", "half", "double", "bfloat16", "int", "long", "bool", "byte", "char",
        "short", "cpu", "cuda", "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like",
        "randint_like", "new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "expand_as", "view_as",
        "reshape_as", "isnan", "isinf", "isfinite", "detach", "clone", "contiguous",
    }
)  # fmt: skip
# In-place operations that refuse a source of another dtype. All others convert by themselves.
_STRICT_IN_PLACE = frozenset(
    {
        "__setitem__", "index_put_", "index_add_", "index_copy_", "index_reduce_", "scatter_", "scatter_add_",
        "scatter_reduce_", "masked_scatter_", "addmm_", "addbmm_", "baddbmm_", "addmv_", "addr_", "put_",
    }
)  # fmt: skip
_TENSOR_VALUED_PROPERTIES = (torch.Tensor.T, torch.Tensor.mT, torch.Tensor.H, torch.Tensor.mH, torch.Tensor.data)
# Operations that raise when float arguments differ; all others promote by themselves.
_REFUSES_MIXED = frozenset(
    {
        "linear", "bilinear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "dot", "vdot", "inner",
        "addmm", "addmv", "addbmm", "baddbmm", "addr", "chain_matmul", "einsum", "tensordot", "conv1d",
        "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "conv_tbc",
        "scaled_dot_product_attention", "multi_head_attention_forward", "layer_norm", "group_norm",
        "batch_norm", "instance_norm", "rms_norm", "embedding_bag", "lstm", "gru", "rnn_tanh", "rnn_relu",
        "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "prelu", "grid_sample", "index_add",
        "index_copy", "scatter", "scatter_add", "masked_scatter", "lerp", "bucketize", "searchsorted",
        "_grouped_mm", "grouped_mm", "native_layer_norm", "native_batch_norm", "_transformer_encoder_layer_fwd",
        "_native_multi_head_attention", "cdist",
    }
)  # fmt: skip
_MISSING_KERNEL = re.compile(
    r"not implemented for '([A-Za-z0-9_]+)'|not supported (?:for|on) .*?(Half|BFloat16|Float8\w*)"
)


class MixedDtypeMode(TorchFunctionMode):
    """The four rules, for the weights as they are now.

    weights: by `id` of the tensor in the module. compute: where a storage-only weight meets no activation.
    device: named in errors. record: hears every implicit cast, where given. autocast: the caller has `torch.autocast` on,
    whose own casts come first; the rules serve where torch would still refuse. `module` is kept current by the caller's
    hooks, and `operation` is what torch is being called for.
    """

    def __init__(
        self,
        weights: Mapping[int, Weight],
        compute: torch.dtype,
        device: torch.device,
        record: Callable[[ImplicitCast], None] | None = None,
        autocast: bool = False,
    ) -> None:
        super().__init__()
        self.weights = weights
        self.compute = compute
        self.device = device
        self.record = record
        self.autocast = autocast
        self.module = ""
        self.operation = ""
        self.acted = False

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: Arguments = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name: str = func.__name__
        if name == "__get__":
            return self._property(func, args)
        if name in _METADATA or name == "__set__":
            return func(*args, **kwargs)
        if name == "is_floating_point" and self._kept(args[0]) is not None:
            return True
        tensors = _tensors(args, kwargs)
        stored = [tensor for tensor in tensors if self._kept(tensor) is not None]
        if name in _EXPLICIT:
            if stored:
                args, kwargs = _replaced(args, kwargs, {id(t): self._brought_back(t, self.compute) for t in stored})
            return func(*args, **kwargs)
        if name == "embedding" and _takes_rows(args, kwargs) and self._kept(args[1]) is not None:
            self.acted = True
            return self._rows(*args[:2])
        target = self._target(name, tensors, stored, kwargs)
        if self.autocast:
            back = {id(tensor): self._brought_back(tensor, target or self.compute) for tensor in stored}
            self.acted = self.acted or bool(back)
            self.operation = name if kwargs.get("dtype") is None else ""
            with_values, named = _replaced(args, kwargs, back)
            try:
                return func(*with_values, **named)
            except RuntimeError:  # autocast knows neither float64 nor recurrent layers on the CPU
                self.operation = ""
                with torch.autocast(self.device.type, enabled=False):
                    return self._by_rules(func, name, tensors, stored, target, args, kwargs)
            finally:
                self.operation = ""
        return self._by_rules(func, name, tensors, stored, target, args, kwargs)

    def _by_rules(
        self,
        func: Any,
        name: str,
        tensors: list[torch.Tensor],
        stored: list[torch.Tensor],
        target: torch.dtype | None,
        args: Arguments,
        kwargs: dict[str, Any],
    ) -> Any:
        if target is None and not stored:
            return _call(func, name, args, kwargs, self)
        casts: dict[int, torch.Tensor] = {}
        for tensor in tensors:
            if self._kept(tensor) is not None:
                casts[id(tensor)] = self._brought_back(tensor, target or self.compute)
            elif target is not None and tensor.dtype != target and tensor.is_floating_point():
                if tensor.ndim == 0 and name not in _REFUSES_MIXED:
                    continue  # torch lets a 0-d tensor follow the others
                casts[id(tensor)] = tensor.to(target)
                if self.record is not None:
                    self._note(name, tensor, target)
        self.acted = self.acted or bool(casts)
        return _call(func, name, *_replaced(args, kwargs, casts), self)

    def _kept(self, tensor: object) -> Weight | None:
        """The weight behind a tensor that is kept in a storage-only dtype, else None."""
        weight = self.weights.get(id(tensor))
        return weight if weight is not None and weight.scale is not None else None

    def _is_weight(self, tensor: torch.Tensor) -> bool:
        """Whether it is a weight or a view of one."""
        return id(tensor) in self.weights or (tensor._base is not None and id(tensor._base) in self.weights)

    def _brought_back(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        weight = self.weights[id(tensor)]
        assert weight.scale is not None
        return dequantize(tensor.data, weight.scale, dtype)

    def _rows(self, ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """What a look-up takes from a storage-only table: only these rows are brought back, never all of it."""
        scale, at = self.weights[id(table)].scale, ids.reshape(-1)
        assert scale is not None
        rows = table.data.view(torch.uint8).index_select(0, at).view(table.dtype)
        rows = dequantize(rows, scale[at] if len(scale) == len(table) else scale, self.compute)
        return rows.view(*ids.shape, table.shape[1])

    def _target(
        self, name: str, tensors: list[torch.Tensor], stored: list[torch.Tensor], kwargs: dict[str, Any]
    ) -> torch.dtype | None:
        """The dtype this operation computes in, or None where torch decides as it always does."""
        floats = [tensor for tensor in tensors if tensor.is_floating_point() and self._kept(tensor) is None]
        if not floats:
            return None
        first = floats[0].dtype
        if not stored and all(tensor.dtype == first for tensor in floats):
            return None
        if kwargs.get("out") is not None or _in_place(name):
            if name not in _STRICT_IN_PLACE and not stored:
                return None
            destination = kwargs.get("out")
            return destination.dtype if isinstance(destination, torch.Tensor) else tensors[0].dtype
        sized = [tensor for tensor in floats if tensor.ndim > 0] or floats  # 0-d tensors have no say, as in torch
        deciding = [tensor for tensor in sized if self._is_weight(tensor)] or sized
        target = deciding[0].dtype
        for tensor in deciding[1:]:
            target = torch.promote_types(target, tensor.dtype)
        return target

    def _property(self, func: Any, args: Arguments) -> Any:
        """`weight.dtype` of a storage-only weight is the dtype it comes back in; `.T` and the like bring it back."""
        if self._kept(args[0]) is None:
            return func(*args)
        if func.__self__ is torch.Tensor.dtype:
            return self.compute
        if func.__self__ in _TENSOR_VALUED_PROPERTIES:
            return func(self._brought_back(args[0], self.compute), *args[1:])
        return func(*args)

    def _note(self, name: str, tensor: torch.Tensor, target: torch.dtype) -> None:
        assert self.record is not None
        self.record(
            ImplicitCast(
                self.module, name, dtype_name(tensor.dtype), dtype_name(target), tensor.numel(), name in _REFUSES_MIXED
            )
        )


class AutocastCastRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hears the casts that `torch.autocast` makes inside an operation, which no function mode can see."""

    def __init__(self, rules: MixedDtypeMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rules = rules

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Arguments = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        rules, target = self.rules, kwargs.get("dtype")
        if func is torch.ops.aten._to_copy.default and rules.operation and rules.record is not None:
            source = args[0]
            if (
                target is not None
                and target != source.dtype
                and source.is_floating_point()
                and target.is_floating_point
            ):
                rules.record(
                    ImplicitCast(
                        rules.module,
                        rules.operation,
                        dtype_name(source.dtype),
                        dtype_name(target),
                        source.numel(),
                        False,
                    )
                )
        return func(*args, **kwargs)


class ReferenceMode(TorchFunctionMode):
    """The reference: every weight as stored, widened as it is used; without a second copy of the model.

    A weight stored in float64 stays float64. Look-ups in an embedding widen only the rows they take.
    """

    def __init__(self, weights: Mapping[int, Weight], device: torch.device) -> None:
        super().__init__()
        self.weights = weights
        self.device = device
        self.module = ""
        self.finished = 0
        self.first_use: dict[int, int] = {}

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: Arguments = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name: str = func.__name__
        if name == "__get__":
            weight = self._weight(args[0])
            if weight is None:
                return func(*args)
            if func.__self__ is torch.Tensor.dtype:
                return _reference_dtype(weight)
            if func.__self__ in _TENSOR_VALUED_PROPERTIES:
                return func(self._values(weight), *args[1:])
            return func(*args)
        if name in _METADATA or name == "__set__":
            return func(*args, **kwargs)
        if name == "is_floating_point" and self._weight(args[0]) is not None:
            return True
        if name == "embedding" and _takes_rows(args, kwargs):
            weight = self._weight(args[1])
            if weight is not None and weight.stored_scale is None:
                rows = func(args[0], weight.original.to(self.device), *args[2:], **kwargs)
                return rows.to(_reference_dtype(weight))
        tensors = _tensors(args, kwargs)
        values = {
            id(tensor): self._values(weight) for tensor in tensors if (weight := self._weight(tensor)) is not None
        }
        if values:
            args, kwargs = _replaced(args, kwargs, values)
            tensors = _tensors(args, kwargs)
        if name not in _EXPLICIT and not _in_place(name):
            floats = [tensor for tensor in tensors if tensor.is_floating_point()]
            if floats and any(tensor.dtype != floats[0].dtype for tensor in floats):
                args, kwargs = _promoted(name, floats, args, kwargs)
        return _call(func, name, args, kwargs, self)

    def _weight(self, tensor: object) -> Weight | None:
        weight = self.weights.get(id(tensor))
        if weight is None or not (weight.info.castable or weight.stored_scale is not None):
            return None
        self.first_use.setdefault(id(tensor), self.finished)
        return weight

    def _values(self, weight: Weight) -> torch.Tensor:
        if weight.stored_scale is not None:
            return dequantize(weight.original.to(self.device), weight.stored_scale, _reference_dtype(weight))
        return weight.original.to(self.device, _reference_dtype(weight))


def _call(
    func: Callable[..., Any], name: str, args: Arguments, kwargs: dict[str, Any], mode: MixedDtypeMode | ReferenceMode
) -> Any:
    """Call torch. A missing kernel becomes a KernelError that names what is missing."""
    try:
        return func(*args, **kwargs)
    except (RuntimeError, NotImplementedError) as error:
        if name in ("_grouped_mm", "grouped_mm"):
            return _grouped_mm(*args, **kwargs)
        if _MISSING_KERNEL.search(str(error)) is None:
            raise
        raise _kernel_error(func, name, args, kwargs, mode, error) from error


def _kernel_error(
    func: Callable[..., Any],
    name: str,
    args: Arguments,
    kwargs: dict[str, Any],
    mode: MixedDtypeMode | ReferenceMode,
    error: Exception,
) -> KernelError:
    """Name what is missing, and try which dtype would have worked."""
    floats = [tensor for tensor in _tensors(args, kwargs) if tensor.is_floating_point()]
    asked = floats[0].dtype if floats else torch.float32
    nearest = None
    for candidate in (torch.bfloat16, torch.float32, torch.float16, torch.float64):
        if candidate == asked:
            continue
        cast_args, cast_kwargs = _replaced(args, kwargs, {id(tensor): tensor.to(candidate) for tensor in floats})
        try:
            func(*cast_args, **cast_kwargs)
        except (RuntimeError, NotImplementedError, TypeError):
            continue
        nearest = dtype_name(candidate)
        break
    reason = str(error).split("\n")[0]
    return KernelError(mode.module, name, dtype_name(asked), str(mode.device), nearest, reason)


def _grouped_mm(rows: torch.Tensor, weights: torch.Tensor, offs: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """The product of each group of rows with its own matrix, where torch's kernel has no such dtype.

    rows [tokens, k], weights [groups, k, n], offs [groups]: the end of each group's rows. Returns [tokens, n].
    """
    result = rows.new_zeros(rows.shape[0], weights.shape[-1])
    start = 0
    for group, end in enumerate(offs.tolist()):
        result[start:end] = rows[start:end] @ weights[group]
        start = end
    return result


def recurrent_arguments(module: nn.Module, args: Arguments, compute: torch.dtype) -> Arguments:
    """The arguments of an `nn.RNN`, `nn.LSTM` or `nn.GRU` in the dtype of its first weight.

    These modules compare dtypes in Python and raise before any torch call that the rules could mend. The
    computation itself then follows rule 1: of all the module's weights, the largest dtype decides.
    """
    if not isinstance(module, nn.RNNBase):
        return args
    first = module._flat_weights[0]
    assert isinstance(first, torch.Tensor)
    target = first.dtype if first.dtype.is_floating_point and first.dtype.itemsize > 1 else compute
    floats = [tensor for tensor in _tensors(args, {}) if tensor.is_floating_point() and tensor.dtype != target]
    return _replaced(args, {}, {id(tensor): tensor.to(target) for tensor in floats})[0]


class FirstUseRecorder(TorchFunctionMode):
    """Changes nothing: notes for every weight how many module calls had finished when it was first looked at."""

    def __init__(self, weights: Mapping[int, Weight]) -> None:
        super().__init__()
        self.weights = weights
        self.module = ""
        self.finished = 0
        self.first_use: dict[int, int] = {}

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: Arguments = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in _tensors(args, kwargs):
            if id(tensor) in self.weights:
                self.first_use.setdefault(id(tensor), self.finished)
        return func(*args, **kwargs)


def _reference_dtype(weight: Weight) -> torch.dtype:
    return torch.float64 if weight.original.dtype == torch.float64 else torch.float32


def _promoted(
    name: str, floats: list[torch.Tensor], args: Arguments, kwargs: dict[str, Any]
) -> tuple[Arguments, dict[str, Any]]:
    """All float arguments in `torch.promote_types` of them; 0-d tensors have no say, as in torch."""
    deciding = [tensor for tensor in floats if tensor.ndim > 0] or floats
    target = deciding[0].dtype
    for tensor in deciding[1:]:
        target = torch.promote_types(target, tensor.dtype)
    casts = {
        id(tensor): tensor.to(target)
        for tensor in floats
        if tensor.dtype != target and (tensor.ndim > 0 or name in _REFUSES_MIXED)
    }
    return _replaced(args, kwargs, casts)


def _takes_rows(args: Arguments, kwargs: Mapping[str, Any]) -> bool:
    """Whether `embedding(ids, table, ...)` just takes rows; with `max_norm` it changes the table first."""
    return 2 <= len(args) < 4 and kwargs.get("max_norm") is None


def _in_place(name: str) -> bool:
    """Whether an operation of this name writes to its first argument."""
    if name.startswith("__"):
        return (name.startswith("__i") and name not in ("__invert__", "__int__", "__index__")) or name == "__setitem__"
    return name.endswith("_") and not name.startswith("_")


def _tensors(args: Arguments, kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments of a torch call; lists, tuples and dictionaries are looked into."""
    found: list[torch.Tensor] = []
    for value in args:
        _collect(value, found)
    for value in kwargs.values():
        _collect(value, found)
    return found


def _collect(value: Any, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, found)


def _replaced(
    args: Arguments, kwargs: dict[str, Any], new: Mapping[int, torch.Tensor]
) -> tuple[Arguments, dict[str, Any]]:
    """The same arguments with some tensors (by `id`) replaced."""
    if not new:
        return args, kwargs
    return tuple(_swap(value, new) for value in args), {key: _swap(value, new) for key, value in kwargs.items()}


def _swap(value: Any, new: Mapping[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return new.get(id(value), value)
    if type(value) in (list, tuple):
        return type(value)(_swap(item, new) for item in value)
    return value
