"""The state of a running forward pass: which modules are running, which calls have ended, and which are not repeated."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dtype_engine.runtime.libraries.torch_private import is_wrapped, own_tensors
from dtype_engine.runtime.modes.weight_mode import WeightMode
from dtype_engine.runtime.passes.kept_positions import AttendedPositions
from dtype_engine.runtime.passes.output_cache import ModuleCall, OutputCache
from dtype_engine.runtime.passes.outputs import first_tensor
from dtype_engine.runtime.passes.side_effects import SideEffects


class ModuleObserver:
    """Receives module outputs during a forward pass. This base class does nothing. call: the number of the module's call."""

    def __call__(self, module: str, call: int, output: torch.Tensor) -> Any:
        """Receive the first float tensor of a module's output, of any shape. The return value is cached with the output."""

    def take_choice(self, module: str, call: int, chosen: torch.Tensor) -> None:
        """Receive the experts that a router chose, [tokens, ...], before `__call__` receives the float tensor of the same call. If
        a module returns an integer tensor together with float tensors, it counts as a router.
        """

    def begin_step(self, done: int, steps: int) -> None:
        """Learn that the pass runs token by token, and that `done` of its `steps` tokens have run."""

    def replay(self, module: str, observed: Any) -> None:
        """Receive again what `__call__` returned in an earlier pass, because the module's output is reused from that pass."""


@dataclass
class ForwardPass:
    """The state of one running forward pass."""

    mode: WeightMode
    observer: ModuleObserver
    """Receives outputs of the modules in `watched`."""
    cache: OutputCache | None
    """Keeps module outputs for later passes. None if no outputs are kept."""
    reusable_calls: dict[tuple[str, int], int]
    """The calls to skip: maps (module, number of its call) to an index in `earlier.calls`."""
    earlier: OutputCache | None
    """The module outputs of an earlier pass, from which `reusable_calls` are taken, or None."""
    weights: Container[int]
    """The `id`s of the model's weights."""
    watched: Container[str] | None = None
    """Names of the modules whose outputs are observed. If None, all modules."""
    effects: SideEffects | None = None
    attended: AttendedPositions = field(default_factory=AttendedPositions)
    calls: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    """The number of ended calls of each watched module."""
    inside: list[str] = field(default_factory=list)
    """The running modules, innermost last. After an exception, the last one is the module that raised it."""
    began: list[int] = field(default_factory=list)
    """For each running module, the number of calls that had ended when it began."""
    spans: list[int] = field(default_factory=list)
    """For each call in `finished`, how many calls had ended when it began."""
    observing_seconds: float = 0.0
    """Time spent on observers in seconds, which is not counted as time of the pass."""
    refused: str = ""
    """Why the pass can't be measured, or "" if it can."""

    def __post_init__(self) -> None:
        self.finished: list[str] = [] if self.cache is None else self.cache.names
        """The module names of all module calls, in the order in which the calls ended."""
        self._thread = threading.get_ident()

    def begin(self, name: str, args: Any, kwargs: Any) -> None:
        """Record that the module `name` is called with the given arguments."""
        self.inside.append(name)
        self.began.append(len(self.finished))
        if self.effects is not None:
            self.effects.begin(args, kwargs)
        self.mode.module = name

    def is_elsewhere(self, name: str, module: nn.Module) -> bool:
        """Return whether a module is called in a different thread from that of the forward pass, where the pass's mode intercepts
        nothing. If such a module has weights, store the error message in `refused`, and end that thread by raising SystemExit.
        """
        if threading.get_ident() == self._thread:
            return False
        for weight, _, _ in own_tensors(module):
            self.refused = (
                f"the model uses {name}.{weight} in another thread ({threading.current_thread().name}) than that of its forward "
                "pass, where casts have no effect: let forward call the layers itself, one after the other"
            )
            raise SystemExit  # ends a thread without a message
        return True

    def watches(self, name: str) -> bool:
        """Return whether the observer receives the outputs of the module `name`."""
        return self.watched is None or name in self.watched

    def earlier_call(self, name: str) -> ModuleCall | None:
        """Return the record of an earlier pass whose output replaces the next call of a module, or None if the module must be
        called.
        """
        index = self.reusable_calls.get((name, self.calls[name])) if self.reusable_calls else None
        return None if index is None or self.earlier is None else self.earlier.calls[index]

    def finish(self, name: str, output: Any) -> None:
        """Record that a call of the module `name` has ended, or was skipped because `output` is reused from an earlier pass."""
        while self.inside.pop() != name:
            self.began.pop()  # this module raised an exception that its caller handled
        began = self.began.pop()
        if self.effects is not None:
            self.effects.finish(name, len(self.inside))
        if self.watches(name):
            self._observe(name, output, began)
        else:
            self.finished.append(name)
        self.mode.module = self.inside[-1] if self.inside else ""
        self.mode.finished = len(self.finished)

    def _observe(self, name: str, output: Any, began: int) -> None:
        """Give a module's output to the observer and the cache. If the output is reused from an earlier pass, they get the earlier
        records of this call and of the calls inside it, which did not run. began: the number of calls that had ended when the
        module began.
        """
        call = self.calls[name]
        index = self.reusable_calls.get((name, call)) if self.reusable_calls else None
        if index is None or self.earlier is None:
            tensor = first_tensor(output)
            if type(output) is tuple and (chosen := _integers(output)) is not None:
                self.observer.take_choice(name, call, chosen)
            observed = self.observer(name, call, tensor) if tensor is not None else None
            if self.cache is not None:
                self.cache.add(name, call, (began, len(self.finished)), output, observed, self.weights)
            self.calls[name] = call + 1
            self.finished.append(name)
            self.spans.append(began)
            return
        # All calls that finished inside the reused call count as finished again, with their stored observations.
        for same in self.earlier.within(index):
            self.observer.replay(same.module, same.observed)
            self.calls[same.module] += 1
            if self.cache is not None:
                self.cache.append(same)
        whole = self.earlier.calls[index]
        self.finished += self.earlier.names[whole.began_after : whole.ended_after + 1]


def _integers(outputs: tuple[Any, ...]) -> torch.Tensor | None:
    """Return a router's chosen experts: the first integer tensor of two or more dimensions among the outputs, or None."""
    for each in outputs:
        if isinstance(each, torch.Tensor) and each.dtype in (torch.int64, torch.int32) and each.ndim >= 2:
            return None if is_wrapped(each) else each
    return None
