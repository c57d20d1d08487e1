"""Contexts in which torch and transformers execute a pass in another way: with another attention kernel, or other settings."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dtype_engine.core.execution import Execution
from dtype_engine.runtime.libraries.hf_private import attention_of, with_attention

_KERNELS = {"math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION}
"""The values of `Execution.attention` that are kernels of torch's `scaled_dot_product_attention`."""
_OF_TRANSFORMERS = {"flex": "flex_attention"}
"""Values of `Execution.attention` that transformers calls otherwise."""
_NO_WARNINGS = partial(warnings.catch_warnings, action="ignore", category=UserWarning)


@contextmanager
def executed(module: nn.Module, execution: Execution) -> Iterator[None]:
    """During the `with` block, the module is executed as `execution` says, but for how inputs are grouped. Raises UserError if it
    can't be.
    """
    with ExitStack() as contexts:
        for name, value in execution.axes().items():
            if name in _CONTEXTS:
                contexts.enter_context(_CONTEXTS[name](module, value))
        yield


@contextmanager
def _attention(module: nn.Module, name: str) -> Iterator[None]:
    wanted = "sdpa" if name in _KERNELS else _OF_TRANSFORMERS.get(name, name)
    with ExitStack() as contexts:
        now = attention_of(module)
        if now != wanted and not (now is None and name in _KERNELS):
            contexts.enter_context(with_attention(module, wanted))
        if name in _KERNELS:
            contexts.enter_context(sdpa_kernel(_KERNELS[name]))
        yield


@contextmanager
def _threads(_: nn.Module, count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _mkldnn(_: nn.Module, enabled: bool) -> Iterator[None]:
    with ExitStack() as contexts:
        with _NO_WARNINGS():  # torch warns that TF32 of oneDNN, which the context sets as well, needs a GPU of Intel
            contexts.enter_context(torch.backends.mkldnn.flags(enabled=enabled))
        try:
            yield
        finally:
            with _NO_WARNINGS():
                contexts.close()


@contextmanager
def _matmul(_: nn.Module, precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


_CONTEXTS: dict[str, Callable[[nn.Module, Any], AbstractContextManager[object]]] = {
    "attention": _attention,
    "threads": _threads,
    "mkldnn": _mkldnn,
    "matmul": _matmul,
}
"""By the name of an axis: returns a context in which the module is executed so. The argument is a value other than the default."""
