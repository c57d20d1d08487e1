"""Tables of torch operations by name, functions that inspect a torch call's arguments, and the call itself. All modes use them.

The name of an operation is `func.__name__`: the name of the `torch.Tensor` method, or of the function in `torch` or
`torch.nn.functional`, that the model called.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch

from dtype_engine.core.errors import KernelError
from dtype_engine.runtime.device import has_float64
from dtype_engine.runtime.formats.dequantize import dtype_name

Arguments = tuple[Any, ...]

# Queries that do not depend on a tensor's values. The original tensor answers them.
METADATA = frozenset(
    {
        "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "is_contiguous",
        "element_size", "data_ptr", "get_device", "is_set_to", "is_complex", "is_inference", "is_pinned",
        "is_shared", "requires_grad_", "register_hook", "__len__", "__hash__", "__repr__",
        "__format__", "is_same_size", "has_names", "refine_names", "is_conj", "is_neg", "is_nonzero",
        "is_tensor", "can_cast",
    }
)  # fmt: skip


TENSOR_PROPERTIES = (torch.Tensor.T, torch.Tensor.mT, torch.Tensor.H, torch.Tensor.mH, torch.Tensor.data)


_MISSING_KERNEL = re.compile(
    r"not implemented for '([A-Za-z0-9_]+)'|not supported (?:for|on) .*?(Half|BFloat16|Float8\w*)"
    # Fourier transforms, torch.linalg.inv, torch.complex and view_as_complex, torch.quantile and torch.linalg.lstsq
    r"|Unsupported dtype (Half|BFloat16)|support tensors of type: (Half|BFloat16)|not supported\. Got (Half|BFloat16)"
    r"|Double tensors but got (Half|BFloat16)|only supported for .*type: (Half|BFloat16)|float (?:or|and) double"
)


_NUMBER_TOO_LARGE = re.compile(r"value cannot be converted to type .* without overflow")
"""Matches the error that CUDA's kernels raise if a number among the arguments, such as the most negative float32 in a mask, is too
large for the dtype of the result. The CPU's kernels round the number to an infinity.
"""


class CallSite(Protocol):
    """Where a torch function is called: the name of the running module, and the device."""

    module: str
    device: torch.device


def call_torch(func: Callable[..., Any], name: str, args: Arguments, kwargs: dict[str, Any], site: CallSite) -> Any:
    """Call a torch function (`name`) and return its result. site: where it is called, for the error. Raises KernelError, with the
    operation and the dtype, if torch has no kernel.
    """
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:
        return recover(func, name, args, kwargs, site, error)


def recover(
    func: Callable[..., Any], name: str, args: Arguments, kwargs: dict[str, Any], site: CallSite, error: RuntimeError
) -> Any:
    """Repeat a call of a torch function that raised `error` in a way that works, and return its result.

    Under autocast, the call is repeated without it, because autocast fails for float64 and, on the CPU, for recurrent layers. A
    grouped product is computed one product at a time. A number that CUDA refuses is passed as a tensor, and is then rounded as on
    the CPU. If none of this applies, raises KernelError if a kernel is missing, and otherwise `error`.
    """
    if torch.is_autocast_enabled(site.device.type):
        with torch.autocast(site.device.type, enabled=False):
            return call_torch(func, name, args, kwargs, site)
    if name in ("_grouped_mm", "grouped_mm"):
        return _grouped_mm(*args, **kwargs)
    if _NUMBER_TOO_LARGE.search(str(error)) is not None and any(isinstance(value, float) for value in args):
        # A tensor without dimensions takes part in promotion as a number does.
        wide = torch.float64 if has_float64(site.device) else torch.float32
        rounded = [
            torch.tensor(value, dtype=wide, device=site.device) if isinstance(value, float) else value for value in args
        ]
        return func(*rounded, **kwargs)
    if _MISSING_KERNEL.search(str(error)) is None:
        raise error
    raise _kernel_error(func, name, args, kwargs, site, error) from error


def _kernel_error(
    func: Callable[..., Any],
    name: str,
    args: Arguments,
    kwargs: dict[str, Any],
    site: CallSite,
    error: Exception,
) -> KernelError:
    floats = [tensor for tensor in tensors_in(args, kwargs) if tensor.is_floating_point()]
    refused = floats[0].dtype if floats else torch.float32
    nearest = None
    for candidate in (torch.bfloat16, torch.float32, torch.float16, torch.float64):
        if candidate == refused:
            continue
        cast_args, cast_kwargs = replace_tensors(args, kwargs, {id(tensor): tensor.to(candidate) for tensor in floats})
        with suppress(RuntimeError, TypeError):
            func(*cast_args, **cast_kwargs)
            nearest = dtype_name(candidate)
            break
    reason = str(error).split("\n")[0]
    return KernelError(site.module, name, dtype_name(refused), str(site.device), nearest, reason)


def _grouped_mm(rows: torch.Tensor, weights: torch.Tensor, offs: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Multiply each group of rows by its own matrix, for dtypes without a grouped kernel. offs: where each group's rows end."""
    result = rows.new_zeros(rows.shape[0], weights.shape[-1])
    start = 0
    for group, end in enumerate(offs.tolist()):
        result[start:end] = rows[start:end] @ weights[group]
        start = end
    return result


def promoted_dtype(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """Return the dtype to which `torch.promote_types` promotes the dtypes of one or more tensors."""
    return functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors])


def takes_rows(args: Arguments, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call of `embedding(ids, table, ...)` only selects rows. With `max_norm`, it also changes the table."""
    return 2 <= len(args) < 4 and kwargs.get("max_norm") is None


def is_in_place(name: str) -> bool:
    """Return whether an operation such as "add_" writes to its first argument, a tensor or a list of tensors."""
    if name.startswith("__"):
        return (name.startswith("__i") and name not in ("__invert__", "__int__", "__index__")) or name == "__setitem__"
    return name.endswith("_") and (not name.startswith("_") or name.startswith("_foreach_"))


def tensors_in(args: Arguments, kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return all tensors among the arguments of a torch call, including those in lists, tuples and dicts."""
    tensors: list[torch.Tensor] = []
    values = [*args, *kwargs.values()]
    for value in values:  # a loop over a list also visits items that are appended meanwhile
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            values += value
        elif isinstance(value, dict):
            values += value.values()
    return tensors


def replace_tensors(
    args: Arguments, kwargs: dict[str, Any], new: Mapping[int, torch.Tensor]
) -> tuple[Arguments, dict[str, Any]]:
    """Return the arguments of a torch call with some tensors replaced by `new`, which is keyed by the `id` of the original."""
    if not new:
        return args, kwargs
    return tuple(_swap(value, new) for value in args), {key: _swap(value, new) for key, value in kwargs.items()}


def _swap(value: Any, new: Mapping[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return new.get(id(value), value)
    if type(value) in (list, tuple):
        return type(value)(_swap(item, new) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple, such as a PackedSequence
        return type(value)(*(_swap(item, new) for item in value))
    return value
