"""How a pass notices every call of a module, and is stopped between two of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from dtype_engine.core.cancellation import IsCancelled
from dtype_engine.core.errors import Cancelled
from dtype_engine.runtime.model.torch_private import WithoutModes, as_called, call_instead, has_forward_hooks
from dtype_engine.runtime.passes.forward_pass import ForwardPass
from dtype_engine.runtime.passes.output_cache import clone_output

Call = Callable[..., Any]


class ModuleCalls:
    """Reports the calls of the modules below one to the pass that is `under_way`, from `watch` or `only_stop` to `remove`.

    It is a function that torch calls in place of a module, and that calls it as torch would: what hooks make of its output is the
    output. As hooks of its own it would take 25 µs a call right after a large product, when nothing is in a cache any more (Intel
    Xeon with AMX). Where a model's code calls `forward` by itself, no module is called.

    Attributes:
        under_way: the pass that the calls are reported to, None between passes.
        modules: those whose calls are reported, and the one that they are below.

    autocast_on: the type of the device for which torch.autocast is on in a pass, if it is.
    """

    def __init__(self, module: nn.Module, cancelled: IsCancelled, autocast_on: str | None = None) -> None:
        self.under_way: ForwardPass | None = None
        self._modules = {name: child for name, child in module.named_modules() if name}
        self.modules = (module, *self._modules.values())
        self._cancelled = cancelled
        self._autocast_on = autocast_on
        self._undo: list[Callable[[], None]] = []

    def watch(self) -> None:
        """Report the calls of all modules."""
        self._put_everywhere(self._reporting)

    def only_stop(self) -> None:
        """Report nothing; a pass can be stopped before every module."""
        self._put_everywhere(self._stopping)

    def remove(self) -> None:
        """Leave nothing on the modules."""
        for undo in self._undo:
            undo()
        self._undo.clear()

    def with_hooks(self) -> frozenset[str]:
        """Modules with forward hooks: transformers collects hidden states with such."""
        return frozenset(name for name, module in self._modules.items() if has_forward_hooks(module))

    def _put_everywhere(self, made: Callable[[str], Call]) -> None:
        self._undo = [call_instead(module, made(name)) for name, module in self._modules.items()]

    def _stopping(self, name: str) -> Call:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._cancelled():
                raise Cancelled
            if isinstance(module, nn.RNNBase) and self.under_way is not None:
                args = self._arguments_of(self.under_way, module, args)
            return as_called(module, *args, **kwargs)

        return call

    def _reporting(self, name: str) -> Call:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            run = self.under_way
            if run is None:
                return as_called(module, *args, **kwargs)
            if self._cancelled():
                raise Cancelled
            run.begin(name, args, kwargs)
            if isinstance(module, nn.RNNBase):
                args = self._arguments_of(run, module, args)
            earlier = run.earlier_call(name)
            if earlier is None:
                output = as_called(module, *args, **kwargs)
            else:
                with WithoutModes():
                    output = clone_output(earlier.output)
            if run.watches(name):
                started = time.perf_counter()
                with self._apart():
                    run.finish(name, output)
                run.observing_seconds += time.perf_counter() - started
            else:
                run.finish(name, output)
            return output

        return call

    def _arguments_of(self, run: ForwardPass, module: nn.Module, args: Any) -> Any:
        with WithoutModes():
            return run.mode.arguments_of(module, args)

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Arithmetic that is not the pass's own: its mode does not see it, and autocast does not choose its dtypes. In a model's
        `torch.inference_mode` it would make tensors that can't be written to after the pass.
        """
        with ExitStack() as contexts:
            if torch.is_inference_mode_enabled():
                contexts.enter_context(torch.inference_mode(False))
                contexts.enter_context(torch.no_grad())
            contexts.enter_context(WithoutModes())
            if self._autocast_on:
                contexts.enter_context(torch.autocast(self._autocast_on, enabled=False))
            yield
