"""What the modes share: tables of torch's operations by name, walking the arguments of a call, and the call itself.

`func.__name__` is the name of an operation here: that of the `torch.Tensor` method or of the function in `torch` or
`torch.nn.functional` which the model called.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from dtype_engine.core.errors import KernelError
from dtype_engine.runtime.model.containers import with_tensors
from dtype_engine.runtime.numerics.quantize import dtype_name

Arguments = tuple[Any, ...]


# Questions about a tensor that no value has part in: answered by the tensor as it is.
METADATA = frozenset(
    {
        "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "is_contiguous",
        "element_size", "data_ptr", "get_device", "is_set_to", "is_complex", "is_inference", "is_pinned",
        "is_shared", "untyped_storage", "requires_grad_", "register_hook", "__len__", "__hash__", "__repr__",
        "__format__", "is_same_size", "has_names", "refine_names", "is_conj", "is_neg", "is_nonzero",
        "is_tensor", "result_type", "can_cast",
    }
)  # fmt: skip


# The model's own, explicit casts and constructors: what they give is what the model asked for.
EXPLICIT = frozenset(
    {
        "to", "type", "type_as", "float", "half", "double", "bfloat16", "int", "long", "bool", "byte", "char",
        "short", "cpu", "cuda", "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like",
        "randint_like", "new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "expand_as", "view_as",
        "reshape_as", "isnan", "isinf", "isfinite", "detach", "clone", "contiguous",
    }
)  # fmt: skip


# In-place operations that refuse a source of another dtype. All others convert by themselves.
STRICT_IN_PLACE = frozenset(
    {
        "__setitem__", "index_put_", "index_add_", "index_copy_", "index_reduce_", "scatter_", "scatter_add_",
        "scatter_reduce_", "masked_scatter_", "addmm_", "addbmm_", "baddbmm_", "addmv_", "addr_", "put_",
    }
)  # fmt: skip


TENSOR_PROPERTIES = (torch.Tensor.T, torch.Tensor.mT, torch.Tensor.H, torch.Tensor.mH, torch.Tensor.data)


# Operations that raise when float arguments differ; all others promote by themselves.
REFUSES_MIXED = frozenset(
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


class CallSite(Protocol):
    """Where a call comes from, for its error: the dotted name of the module that is running, and the device."""

    module: str
    device: torch.device


def call_torch(func: Callable[..., Any], name: str, args: Arguments, kwargs: dict[str, Any], site: CallSite) -> Any:
    """Call torch. A missing kernel becomes a KernelError that names what is missing."""
    try:
        return func(*args, **kwargs)
    except (RuntimeError, NotImplementedError) as error:
        if name in ("_grouped_mm", "grouped_mm"):
            return _grouped_mm(*args, **kwargs)
        if _MISSING_KERNEL.search(str(error)) is None:
            raise
        raise _kernel_error(func, name, args, kwargs, site, error) from error


def _kernel_error(
    func: Callable[..., Any],
    name: str,
    args: Arguments,
    kwargs: dict[str, Any],
    site: CallSite,
    error: Exception,
) -> KernelError:
    """Name what is missing, and try which dtype would have worked."""
    floats = [tensor for tensor in tensors_in(args, kwargs) if tensor.is_floating_point()]
    refused = floats[0].dtype if floats else torch.float32
    nearest = None
    for candidate in (torch.bfloat16, torch.float32, torch.float16, torch.float64):
        if candidate == refused:
            continue
        cast_args, cast_kwargs = replace_tensors(args, kwargs, {id(tensor): tensor.to(candidate) for tensor in floats})
        try:
            func(*cast_args, **cast_kwargs)
        except (RuntimeError, NotImplementedError, TypeError):
            continue
        nearest = dtype_name(candidate)
        break
    reason = str(error).split("\n")[0]
    return KernelError(site.module, name, dtype_name(refused), str(site.device), nearest, reason)


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


def promote_floats(
    name: str, floats: list[torch.Tensor], args: Arguments, kwargs: dict[str, Any]
) -> tuple[Arguments, dict[str, Any]]:
    """The arguments with all of `floats` in their promoted dtype; 0-d tensors do not decide, as in torch."""
    target = promoted_dtype([tensor for tensor in floats if tensor.ndim > 0] or floats)
    casts = {
        id(tensor): tensor.to(target)
        for tensor in floats
        if tensor.dtype != target and (tensor.ndim > 0 or name in REFUSES_MIXED)
    }
    return replace_tensors(args, kwargs, casts)


def promoted_dtype(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """`torch.promote_types` of the dtypes of one or more tensors."""
    return functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors])


def takes_rows(args: Arguments, kwargs: Mapping[str, Any]) -> bool:
    """Whether `embedding(ids, table, ...)` just takes rows; with `max_norm` it changes the table first."""
    return 2 <= len(args) < 4 and kwargs.get("max_norm") is None


def is_in_place(name: str) -> bool:
    """Whether an operation of this name writes to its first argument."""
    if name.startswith("__"):
        return (name.startswith("__i") and name not in ("__invert__", "__int__", "__index__")) or name == "__setitem__"
    return name.endswith("_") and not name.startswith("_")


def tensors_in(args: Arguments, kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments of a torch call; lists, tuples and dictionaries are looked into."""
    tensors: list[torch.Tensor] = []
    for value in args:
        _collect(value, tensors)
    for value in kwargs.values():
        _collect(value, tensors)
    return tensors


def _collect(value: Any, tensors: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, tensors)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, tensors)


def replace_tensors(
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


def recurrent_arguments(module: nn.Module, args: Arguments, compute: torch.dtype) -> Arguments:
    """The arguments of an `nn.RNN`, `nn.LSTM` or `nn.GRU` in the dtype of its first weight.

    These modules compare dtypes in Python and raise before any torch call that the rules could mend. The
    computation itself then follows rule 1: of all the module's weights, the largest dtype decides.
    """
    if not isinstance(module, nn.RNNBase):
        return args
    first = module.weight_ih_l0
    assert isinstance(first, torch.Tensor)
    target = first.dtype if first.dtype.is_floating_point and first.dtype.itemsize > 1 else compute
    given: Arguments = with_tensors(args, lambda tensor: tensor.to(target) if tensor.is_floating_point() else tensor)
    return given
