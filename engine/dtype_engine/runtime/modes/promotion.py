"""Runs torch calls whose float arguments have several dtypes. If torch refuses a call, it is repeated with one common dtype.

Whether torch refuses a call is found by trying. The answer is remembered for later calls of the same operation whose arguments have
the same dtypes, numbers of dimensions, layouts and flags. The common dtype is that of the weights among the arguments (promoted, if
they have several dtypes). If there are no weights, it is the promoted dtype of all float arguments. An operation that writes to an
argument uses that argument's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dtype_engine.core.errors import KernelError
from dtype_engine.runtime.device import random_states, set_random_states
from dtype_engine.runtime.formats.dequantize import dtype_name
from dtype_engine.runtime.libraries.torch_private import is_wrapped
from dtype_engine.runtime.modes.op_tables import (
    Arguments,
    CallSite,
    call_torch,
    is_in_place,
    promoted_dtype,
    replace_tensors,
    tensors_in,
)

_KEEP_DTYPES = frozenset({"to", "type", "type_as", "view_as", "expand_as", "reshape_as", "resize_as_", "result_type"})
"""Operations without promotion: they use their second tensor only for its dtype or shape, or they return a dtype."""
_NO_CONTEXT = nullcontext()
_accepted: set[Any] = set()
"""The calls with several dtypes that torch accepts: (function, autocast's dtype, device type, `_form` of the arguments)."""
_refused: set[Any] = set()
"""The calls that torch refuses with several dtypes and runs with one dtype, described as in `_accepted`."""


@dataclass(frozen=True, slots=True)
class ImplicitCast:
    """The cast of one tensor that an operation makes without a request in the model's code."""

    module: str
    operation: str
    source: str
    target: str
    """The dtype after the cast. If it is a format with scales, such as float8, the tensor was rounded to it but keeps its dtype."""
    elements: int
    torch_raises: bool
    """True if plain torch refuses the operation without this cast, False if torch makes the cast itself."""


class MixedCallSite(CallSite, Protocol):
    """Where a torch function is called, which tensors are weights, and how to record casts. `WeightMode` describes the fields."""

    record: Callable[[ImplicitCast], None] | None
    operation: str
    added: bool

    def is_weight(self, tensor: torch.Tensor) -> bool: ...


def call_mixed(func: Any, name: str, args: Arguments, kwargs: dict[str, Any], site: MixedCallSite) -> Any:
    """Call a torch function whose float arguments may have several dtypes, and return its result. If torch refuses them, they are
    first cast to one dtype. Raises KernelError if torch has no kernel for the call, and torch's own error if the reason is not a
    difference in dtypes.
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
    """Describe the cast of `tensor` to `target` in an operation. torch_raises: whether plain torch refuses to run without it."""
    source = dtype_name(tensor.dtype)
    return ImplicitCast(site.module, operation, source, dtype_name(target), tensor.numel(), torch_raises)


def _form(value: Any) -> Any:
    """Return a hashable description of the properties of an argument that decide whether torch refuses it.

    For a tensor, these are the dtype, the number of dimensions, whether it is contiguous, and whether a transform such as
    `torch.vmap` wraps it. For a string, flag or dtype, it is the value. A container is described by what it contains. (Contiguity
    matters because `linear` adds a bias of another dtype only if the input is not contiguous.)
    """
    if isinstance(value, torch.Tensor):
        contiguous = value.layout is torch.strided and value.is_contiguous()
        return value.dtype, value.ndim, contiguous, is_wrapped(value)
    if isinstance(value, (list, tuple)):
        return type(value), *map(_form, value)
    if isinstance(value, dict):
        return tuple((key, _form(item)) for key, item in value.items())
    return value if isinstance(value, (str, bool, torch.dtype)) else type(value)


def _destination(name: str, args: Arguments, kwargs: dict[str, Any]) -> torch.Tensor | None:
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
    """Record the casts of `floats` that torch made in a call: to the dtype in which it computed, or to that of its destination."""
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
    """Restores what a torch call may have changed before it failed: the tensor to which it writes, and random number generators."""

    def __init__(self, name: str, args: Arguments, kwargs: dict[str, Any], device: torch.device) -> None:
        self._destination = _destination(name, args, kwargs)
        self._values = None if self._destination is None else self._destination.detach().clone()
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Generator)]
        self._generators = [(generator, generator.get_state()) for generator in given]
        self._device, self._states = device, random_states(device)

    def restore(self) -> None:
        for generator, state in self._generators:
            generator.set_state(state)
        set_random_states(self._device, self._states)
        if self._destination is None or self._values is None or torch.equal(self._destination, self._values):
            return
        self._destination.copy_(self._values)
