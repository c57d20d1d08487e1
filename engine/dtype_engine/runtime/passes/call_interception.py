"""Intercepts the module calls of a forward pass, so that each call can be observed and the pass can be cancelled before it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from dtype_engine.core.callbacks import ignore
from dtype_engine.core.cancellation import IsCancelled
from dtype_engine.core.errors import Cancelled
from dtype_engine.runtime.libraries.torch_private import WithoutModes, as_called, call_instead, has_forward_hooks
from dtype_engine.runtime.model.device_map import MovesInputs
from dtype_engine.runtime.passes.forward_pass import ForwardPass
from dtype_engine.runtime.passes.output_cache import clone_output

Call = Callable[..., Any]


class ModuleCalls:
    """Intercepts the calls of all submodules of `module` in forward passes.

    When the model's code calls a submodule, torch calls a function of this class instead. This function then calls the submodule
    with its hooks, and reports the output after the hooks. A forward hook would cost 25 µs for a call after a large matrix product
    (Intel Xeon with AMX). Direct calls of a submodule's `forward` are not intercepted.

    Attributes:
        under_way: the forward pass to which calls are reported, or None between passes.
        modules: the module and all its submodules.

    cancelled: called before each submodule call. autocast_on: the device type for which passes enable torch.autocast, or None.
    blocks: names of modules. `on_block(name)` is called before each call of one of them.
    """

    def __init__(
        self,
        module: nn.Module,
        cancelled: IsCancelled,
        autocast_on: str | None = None,
        blocks: Collection[str] = (),
        on_block: Callable[[str], None] = ignore,
    ) -> None:
        self.under_way: ForwardPass | None = None
        self._modules = {name: child for name, child in module.named_modules() if name}
        self.modules = (module, *self._modules.values())
        self._cancelled = cancelled
        self._autocast_on = autocast_on
        self._blocks = blocks
        self._on_block = on_block
        self._undo: list[Callable[[], None]] = []

    def intercept(self, reports: bool) -> None:
        """From now on, check for cancellation before each submodule call, and, if `reports`, report the calls to `under_way`."""
        made = self._reporting if reports else self._stopping
        self._undo = [call_instead(module, made(name)) for name, module in self._modules.items()]

    def remove(self) -> None:
        """Stop intercepting calls, and restore the modules."""
        for undo in self._undo:
            undo()
        self._undo.clear()

    def with_hooks(self) -> frozenset[str]:
        """Return the names of submodules with forward hooks, such as those with which transformers collects hidden states."""
        return frozenset(name for name, module in self._modules.items() if has_forward_hooks(module, MovesInputs))

    def _stopping(self, name: str) -> Call:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._cancelled():
                raise Cancelled
            if name in self._blocks:
                self._on_block(name)
            if (run := self.under_way) is not None and not run.is_elsewhere(name, module):
                args = self._arguments_of(run, module, args, kwargs)
            return as_called(module, *args, **kwargs)

        return call

    def _reporting(self, name: str) -> Call:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            run = self.under_way
            if run is None or run.is_elsewhere(name, module):
                return as_called(module, *args, **kwargs)
            if self._cancelled():
                raise Cancelled
            run.begin(name, args, kwargs)
            args = self._arguments_of(run, module, args, kwargs)
            earlier = run.earlier_call(name)
            if earlier is None:
                if name in self._blocks:
                    self._on_block(name)
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

    def _arguments_of(self, run: ForwardPass, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the positional arguments for a call, which the mode may cast for an RNN. Record the masks of torch's attention."""
        if isinstance(module, nn.RNNBase):
            with WithoutModes():
                return run.mode.arguments_of(module, args)
        if type(module) is nn.MultiheadAttention:  # the arguments of a subclass can have other meanings
            with self._apart():
                run.attended.add(module, *args, **kwargs)
        return args

    def _apart(self) -> AbstractContextManager[object]:
        """Return a context for the arithmetic of observers, in which no torch-function mode intercepts calls, and autocast and the
        model's own `torch.inference_mode` are off. (Tensors created in inference mode could not be written to after the pass.)
        """
        return self._with_defaults() if self._autocast_on or torch.is_inference_mode_enabled() else WithoutModes()

    @contextmanager
    def _with_defaults(self) -> Iterator[None]:
        with ExitStack() as contexts:
            if torch.is_inference_mode_enabled():
                contexts.enter_context(torch.inference_mode(False))
                contexts.enter_context(torch.no_grad())
            contexts.enter_context(WithoutModes())
            if self._autocast_on:
                contexts.enter_context(torch.autocast(self._autocast_on, enabled=False))
            yield
