"""The hooks by which a pass is observed, and stopped between two modules."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from dtype_engine.core.cancellation import IsCancelled
from dtype_engine.core.errors import Cancelled
from dtype_engine.runtime.model.torch_private import WithoutModes, forward_hook_ids
from dtype_engine.runtime.passes.forward_pass import ForwardPass


class PassHooks:
    """Hooks on the modules below one, which tell `under_way` of every call of a module that is `watched`, and that others finished.

    Attributes:
        under_way: the pass that is told, None between passes.
        names: the modules that have hooks.
        modules: those, and the one that they are below.

    autocast_on: the type of the device for which torch.autocast is on in a pass, if it is.
    """

    def __init__(self, module: nn.Module, cancelled: IsCancelled, autocast_on: str | None = None) -> None:
        self.under_way: ForwardPass | None = None
        self._modules = {name: child for name, child in module.named_modules() if name}
        self.modules = (module, *self._modules.values())
        self._cancelled = cancelled
        self._autocast_on = autocast_on
        self._watched: frozenset[str] | None = None
        self._handles: dict[str, list[Any]] = {}

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._modules)

    def watch(self, names: frozenset[str]) -> None:
        """Tell of calls of these modules, and of the others only that they finished, which takes a third of the time."""
        if names == self._watched:
            return
        for name, module in self._modules.items():
            if name in self._handles and self._watched is not None and (name in names) == (name in self._watched):
                continue
            self._remove_from(name)
            if name in names:
                before = module.register_forward_pre_hook(self._before(name), with_kwargs=True)
                self._handles[name] = [before, module.register_forward_hook(self._after(name))]
            else:
                self._handles[name] = [module.register_forward_hook(self._count(name))]
        self._watched = names

    def only_stop(self) -> None:
        """Observe nothing; a pass can be stopped before every module."""
        self.remove()
        self._handles = {name: [module.register_forward_pre_hook(self._stop)] for name, module in self._modules.items()}

    def remove(self) -> None:
        """Leave nothing on the modules."""
        for name in self._modules:
            self._remove_from(name)
        self._watched = None

    def _remove_from(self, name: str) -> None:
        for handle in self._handles.pop(name, ()):
            handle.remove()

    def of_others(self) -> frozenset[str]:
        """Modules with other hooks than these: transformers collects hidden states with such."""
        ours = {handle.id for handles in self._handles.values() for handle in handles}
        return frozenset(name for name, module in self._modules.items() if forward_hook_ids(module) - ours)

    def _stop(self, module: nn.Module, args: Any) -> None:
        if self._cancelled():
            raise Cancelled

    def _count(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            run = self.under_way
            if run is not None:
                run.finished.append(name)
                if self._cancelled():
                    raise Cancelled

        return hook

    def _before(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            run = self.under_way
            if run is None:
                return None
            if self._cancelled():
                raise Cancelled
            return run.begin(name, module, args, kwargs)

        return hook

    def _after(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            run = self.under_way
            if run is None:
                return
            started = time.perf_counter()
            apart = run.mode is not None or self._autocast_on or torch.is_inference_mode_enabled()
            with self._apart(run) if apart else nullcontext():
                run.finish(name, output)
            run.observing_seconds += time.perf_counter() - started

        return hook

    @contextmanager
    def _apart(self, run: ForwardPass) -> Iterator[None]:
        """Arithmetic that is not the pass's own: its mode does not see it, and autocast does not choose its dtypes. In a model's
        `torch.inference_mode` it would make tensors that can't be written to after the pass.
        """
        with ExitStack() as contexts:
            if torch.is_inference_mode_enabled():
                contexts.enter_context(torch.inference_mode(False))
                contexts.enter_context(torch.no_grad())
            if run.mode is not None:
                contexts.enter_context(WithoutModes())
            if self._autocast_on:
                contexts.enter_context(torch.autocast(self._autocast_on, enabled=False))
            yield
