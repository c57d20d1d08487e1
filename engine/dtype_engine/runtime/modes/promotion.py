"""Runs calls whose float arguments have several dtypes. If torch refuses a call, the call runs with one common dtype instead.

Whether torch refuses is found by calling it, and is remembered for each operation and form of arguments (their dtypes, numbers of
dimensions, layouts and flags). The common dtype is that of the weights among the arguments (promoted, if the weights have several
dtypes), else the promoted dtype of all float arguments. An operation that writes to an argument uses that argument's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dtype_engine.core.errors import KernelError
from dtype_engine.runtime.modes.op_tables import (
    Arguments,
    CallSite,
    call_torch,
    is_in_place,
    promoted_dtype,
    replace_tensors,
    tensors_in,
)
from dtype_engine.runtime.numerics.quantize import dtype_name

_KEEP_DTYPES = frozenset({"to", "type", "type_as", "view_as", "expand_as", "reshape_as", "resize_as_", "result_type"})
"""Operations without promotion: their second tensor only gives the dtype or shape of the result, or the result is a dtype."""
_NO_CONTEXT = nullcontext()
_accepted: set[Any] = set()
"""Forms of calls with several dtypes that torch accepts."""
_refused: set[Any] = set()
"""Forms of calls with several dtypes that torch refuses, but runs if all arguments have one dtype."""


@dataclass(frozen=True, slots=True)
class ImplicitCast:
    """The cast of one tensor on its way into an operation."""

    module: str
    """The dotted name of the module that called the operation."""
    operation: str
    source: str
    target: str
    """The dtype of the cast. If it is a format that is only stored, such as float8, the tensor was rounded to it but keeps its
    dtype.
    """
    elements: int
    torch_raises: bool
    """Whether plain torch refuses the operation without this cast. If False, torch makes the cast itself."""


class MixedCallSite(CallSite, Protocol):
    """The place from which a torch function is called, and a callback that records the casts of its arguments."""

    record: Callable[[ImplicitCast], None] | None
    """A function that is called with every implicit cast, or None if casts are not recorded."""
    operation: str
    """The name of the operation that torch is running, if torch makes the casts inside it; otherwise ""."""
    added: bool
    """Set to True if a torch call ran with arguments that differ from those which the model's code passed."""

    def is_weight(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is a weight or a view of one."""


def call_mixed(func: Any, name: str, args: Arguments, kwargs: dict[str, Any], site: MixedCallSite) -> Any:
    """Call a torch function whose float arguments may have several dtypes.

    Raises KernelError if torch has no kernel for the call, and torch's own error if the reason is not a difference in dtypes.
    """
    floats = [tensor for tensor in tensors_in(args, kwargs) if tensor.is_floating_point()]
    if len({tensor.dtype for tensor in floats}) < 2:
        return call_torch(func, name, args, kwargs, site)
    autocast = torch.is_autocast_enabled(site.device.type)
    form = func, autocast and torch.get_autocast_dtype(site.device.type), site.device.type, _form((args, kwargs))
    refusal: Exception | None = None
    before = None if form in _accepted or form in _refused else _BeforeCall(name, args, kwargs, site.device)
    if form not in _refused:
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, ValueError, TypeError) as error:
            if before is not None:
                before.restore()
            refusal = error
        else:
            _accepted.add(form)
            if site.record is not None and name not in _KEEP_DTYPES:
                _note_promotions(name, floats, args, kwargs, result, site)
            return result
    site.operation = ""
    target = _common_dtype(name, floats, args, kwargs, site)
    casts = {id(tensor): tensor.to(target) for tensor in floats if tensor.dtype != target}
    new_args, new_kwargs = replace_tensors(args, kwargs, casts)
    try:
        with torch.autocast(site.device.type, enabled=False) if autocast else _NO_CONTEXT:
            result = call_torch(func, name, new_args, new_kwargs, site)
    except KernelError:
        raise
    except Exception as error:
        if before is not None:
            before.restore()
        raise refusal or error from None
    _refused.add(form)
    site.added = True
    if site.record is not None:
        for tensor in floats:
            if tensor.dtype != target:
                site.record(cast_of(tensor, target, name, site, torch_raises=True))
    return result


def cast_of(
    tensor: torch.Tensor, target: torch.dtype, operation: str, site: CallSite, torch_raises: bool
) -> ImplicitCast:
    """Return the record of a cast of `tensor` to `target`."""
    source = dtype_name(tensor.dtype)
    return ImplicitCast(site.module, operation, source, dtype_name(target), tensor.numel(), torch_raises)


def _form(value: Any) -> Any:
    """Return the properties of an argument that may make torch refuse it: its dtype, number of dimensions and layout, or the value
    of a string or flag. (`linear` adds a bias of another dtype only to what is not contiguous.)
    """
    if isinstance(value, torch.Tensor):
        return value.dtype, value.ndim, value.layout is torch.strided and value.is_contiguous()
    if isinstance(value, (list, tuple)):
        return type(value), *map(_form, value)
    if isinstance(value, dict):
        return tuple((key, _form(item)) for key, item in value.items())
    return value if isinstance(value, (str, bool, torch.dtype)) else type(value)


def _destination(name: str, args: Arguments, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return the tensor to which a torch call writes, or None if the call returns a new tensor."""
    written = kwargs.get("out")
    if written is None and is_in_place(name) and args:
        written = args[0]
    return written if isinstance(written, torch.Tensor) else None


def _common_dtype(
    name: str, floats: Sequence[torch.Tensor], args: Arguments, kwargs: dict[str, Any], site: MixedCallSite
) -> torch.dtype:
    destination = _destination(name, args, kwargs)
    if destination is not None and destination.is_floating_point():
        return destination.dtype
    sized = [tensor for tensor in floats if tensor.ndim] or floats  # 0-d tensors do not decide, as in torch
    return promoted_dtype([tensor for tensor in sized if site.is_weight(tensor)] or sized)


def _note_promotions(
    name: str, floats: Sequence[torch.Tensor], args: Arguments, kwargs: dict[str, Any], result: Any, site: MixedCallSite
) -> None:
    """Record the casts that torch made itself: to the dtype in which it computed, or to that of the tensor it wrote to."""
    assert site.record is not None
    destination = _destination(name, args, kwargs)
    sized = [tensor for tensor in floats if tensor.ndim]
    if destination is not None:
        target = destination.dtype
    elif sized:
        target = promoted_dtype(sized)
        made = [tensor for tensor in tensors_in((result,), {}) if tensor.is_floating_point()]
        if made and all(tensor.dtype != target for tensor in made):
            return  # such as a norm of bfloat16 rows, which uses float32 weights without a cast
    else:
        return
    for tensor in sized:
        if tensor.dtype != target and target.is_floating_point:
            site.record(cast_of(tensor, target, name, site, torch_raises=False))


class _BeforeCall:
    """Saves what a failing call may have changed: the tensor to which it writes, and random number generators."""

    def __init__(self, name: str, args: Arguments, kwargs: dict[str, Any], device: torch.device) -> None:
        self._destination = _destination(name, args, kwargs)
        self._values = None if self._destination is None else self._destination.detach().clone()
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Generator)]
        own = [
            torch.default_generator,
            *([torch.cuda.default_generators[device.index or 0]] if device.type == "cuda" else []),
        ]
        self._generators = [(generator, generator.get_state()) for generator in (*own, *given)]

    def restore(self) -> None:
        """Restore the saved tensor and generators."""
        for generator, state in self._generators:
            generator.set_state(state)
        if self._destination is None or self._values is None or torch.equal(self._destination, self._values):
            return
        self._destination.copy_(self._values)
