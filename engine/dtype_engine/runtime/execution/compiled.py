"""Runs a model as `torch.compile` compiles it, to one graph, with the outputs of its modules.

Nothing intercepts a compiled pass, so only weights in dtypes that torch computes in can run so. Hooks that are registered before
the model is compiled become part of the graph, and keep the modules' outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from dtype_engine.core.errors import UserError
from dtype_engine.core.text import printable
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.passes.forward_pass import ModuleObserver


class CompiledModel:
    """A model, compiled by one of torch's backends, whose passes keep the modules' outputs. Raises UserError for a model with
    weights that are no plain tensors.
    """

    def __init__(self, model: LiveModel, backend: str) -> None:
        for name, weight in model.weights.items():
            if weight.scale is not None or weight.decoded or weight.blockwise:
                raise UserError(
                    f"compile={backend} runs plain tensors only: {printable(name)} is in {weight.dtype}; give it a dtype that "
                    "torch computes in, such as bfloat16"
                )
        if model.cache_formats:
            raise UserError(f"compile={backend} runs plain tensors only: leave out the formats of KV caches")
        self._model, self._backend = model, backend
        self._outputs: dict[str, list[torch.Tensor]] = {}
        self._compiled: Callable[..., Any] | None = None
        self._hooks: list[Any] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, which is compiled in the first call. Raises UserError if it can't be compiled to one graph."""
        module = self._model.module
        if self._compiled is None:
            torch.compiler.reset()
            self._hooks = [
                each.register_forward_hook(partial(_keep, self._outputs, name)) for name, each in _parts(module)
            ]
            self._compiled = torch.compile(module, backend=self._backend, fullgraph=True)
        self._outputs.clear()
        try:
            return self._compiled(*args, **kwargs)
        except Exception as error:
            if not type(error).__module__.startswith("torch._dynamo"):
                raise
            first = printable(str(error).strip().partition("\n")[0], 200)
            raise UserError(f"compile={self._backend} makes no single graph of this model: {first}") from None

    def give(self, observer: ModuleObserver) -> None:
        """Give the modules' outputs of the last pass to an observer."""
        for name, outputs in self._outputs.items():
            for call, output in enumerate(outputs):
                observer(name, call, output)
        self._outputs.clear()

    def close(self) -> None:
        """Remove the hooks, and what torch keeps of the compiled model."""
        for hook in self._hooks:
            hook.remove()
        self._outputs.clear()
        torch.compiler.reset()


def _parts(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, each) for name, each in module.named_modules() if name]


def _keep(outputs: dict[str, list[torch.Tensor]], name: str, _: nn.Module, args: Any, output: Any) -> None:
    """Keep a copy of a module's output, or of its first one. This is traced, so it must be simple."""
    first = output[0] if isinstance(output, tuple) and len(output) else output
    if isinstance(first, torch.Tensor) and first.is_floating_point():
        outputs.setdefault(name, []).append(first.clone())
