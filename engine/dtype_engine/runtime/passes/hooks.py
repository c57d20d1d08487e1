"""The hooks by which a pass is observed, and stopped between two modules."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from dtype_engine.core.cancellation import IsCancelled
from dtype_engine.core.errors import Cancelled
from dtype_engine.runtime.model.torch_private import WithoutModes, forward_hook_ids, is_called_as_module
from dtype_engine.runtime.passes.forward_pass import ForwardPass


class PassHooks:
    """What tells `under_way` of every call of the modules below one.

    Modules that `watch` names have hooks: the pass knows when their calls begin, and can put an earlier output in place of theirs.
    Others have a function around their `forward`, which tells what it returned. Both hooks of a call take 5 µs, and right after a
    large product, when nothing of that is in a cache any more, 25 µs (Intel Xeon with AMX); such a function 3.

    Attributes:
        under_way: the pass that is told, None between passes.
        modules: those that are told of, and the one that they are below.

    autocast_on: the type of the device for which torch.autocast is on in a pass, if it is.
    """

    def __init__(self, module: nn.Module, cancelled: IsCancelled, autocast_on: str | None = None) -> None:
        self.under_way: ForwardPass | None = None
        self._modules = {name: child for name, child in module.named_modules() if name}
        self.modules = (module, *self._modules.values())
        self._cancelled = cancelled
        self._autocast_on = autocast_on
        self._hooked: frozenset[str] | None = None
        self._handles: dict[str, list[Any]] = {}
        self._around: dict[str, tuple[Callable[..., Any], Callable[..., Any] | None]] = {}
        """The functions around modules' `forward`, and the `forward` that a module had of its own, not of its class."""

    def watch(self, only: frozenset[str] | None = None) -> None:
        """Have hooks on these modules, None: on all, and on those that have others, which may change what the module returns."""
        names = frozenset(self._modules) if only is None else only
        if names == self._hooked:
            return
        for name, module in self._modules.items():
            if self._hooked is not None and (name in names) == (name in self._hooked):
                continue
            self._remove_from(name)
            if name in names or forward_hook_ids(module):
                before = module.register_forward_pre_hook(self._before(name), with_kwargs=True)
                self._handles[name] = [before, module.register_forward_hook(self._after(name))]
            else:
                self._put_around(name, module)
        self._hooked = names

    def only_stop(self) -> None:
        """Observe nothing; a pass can be stopped before every module."""
        self.remove()
        self._handles = {name: [module.register_forward_pre_hook(self._stop)] for name, module in self._modules.items()}

    def remove(self) -> None:
        """Leave nothing on the modules."""
        for name in self._modules:
            self._remove_from(name)
        self._hooked = None

    def _remove_from(self, name: str) -> None:
        for handle in self._handles.pop(name, ()):
            handle.remove()
        around, own = self._around.pop(name, (None, None))
        kept = self._modules[name].__dict__
        if around is None or kept.get("forward") is not around:
            return
        if own is None:
            del kept["forward"]
        else:
            kept["forward"] = own

    def of_others(self) -> frozenset[str]:
        """Modules with other hooks than these: transformers collects hidden states with such."""
        ours = {handle.id for handles in self._handles.values() for handle in handles}
        return frozenset(name for name, module in self._modules.items() if forward_hook_ids(module) - ours)

    def _stop(self, module: nn.Module, args: Any) -> None:
        if self._cancelled():
            raise Cancelled

    def _put_around(self, name: str, module: nn.Module) -> None:
        forward: Any = module.forward
        # What is no method of this module (a static one, a function of torch) takes no module.
        method = forward.__func__ if isinstance(forward, MethodType) and forward.__self__ is module else None

        def around(self_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            called = is_called_as_module()
            output = method(self_, *args, **kwargs) if method is not None else forward(*args, **kwargs)
            run = self.under_way
            if called and run is not None:
                if run.watched is None or name in run.watched:
                    self._take_in(run, run.observe, name, output)
                else:
                    run.finished.append(name)
                if self._cancelled():
                    raise Cancelled
            return output

        # Bound: where a model copies the module, the copy runs itself. Models ask for the names of its arguments.
        told: Any
        if method is not None:
            around.__wrapped__ = method  # type: ignore[attr-defined]
            told = MethodType(around, module)
        else:
            told = partial(around, module)
            told.__wrapped__ = forward
        self._around[name] = told, module.__dict__.get("forward")
        module.__dict__["forward"] = told

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
            self._take_in(run, run.finish, name, output)

        return hook

    def _take_in(self, run: ForwardPass, take_in: Callable[[str, Any], None], name: str, output: Any) -> None:
        """Take in what a module returned: neither that nor the time that it takes is the pass's own."""
        started = time.perf_counter()
        if run.mode is not None or self._autocast_on or torch.is_inference_mode_enabled():
            with self._apart(run):
                take_in(name, output)
        else:
            take_in(name, output)
        run.observing_seconds += time.perf_counter() - started

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
