"""One forward pass under way: which modules run, what finished, and whose outputs of an earlier pass are reused."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container
from typing import Any

import torch

from dtype_engine.runtime.modes.weight_mode import WeightMode
from dtype_engine.runtime.passes.output_cache import ModuleCall, OutputCache, record_call
from dtype_engine.runtime.passes.outputs import first_tensor
from dtype_engine.runtime.passes.side_effects import SideEffects


class ModuleObserver:
    """Gets every module's output as the pass goes by, and ignores what its subclass does not take."""

    def __call__(self, module: str, call: int, output: torch.Tensor) -> Any:
        """Take a module's first float tensor, in any shape; `call` counts that module's calls from 0. What it returns is kept
        with the output.
        """

    def take_choice(self, module: str, call: int, chosen: torch.Tensor) -> None:
        """Take the first tensor of integers, [tokens, ...], that a module returned next to float tensors: a router's choice of
        experts. It comes before the module's own output.
        """

    def replay(self, module: str, observed: Any) -> None:
        """Take what an earlier pass's observer returned, for a call whose output is reused from that pass."""


class ForwardPass:
    """The state of one forward pass while it is under way.

    Attributes:
        calls: how many calls of each module that is watched have finished.
        inside: the modules that are running, the innermost last, or the one that raised.
        began: how many calls had finished before each of those that are running.
        finished: the modules of the calls that have finished, one after another.
        spans: of each of them how many calls had finished when it began, where every module is watched.
        effects: what watches for side effects, if anything does.
        observing_seconds: seconds spent on observing, which do not belong to the pass.

    weights: the model's, by `id`. watched: the modules whose outputs are observed, None for all.
    """

    def __init__(
        self,
        mode: WeightMode,
        observer: ModuleObserver,
        cache: OutputCache | None,
        reusable_calls: dict[tuple[str, int], int],
        earlier: OutputCache | None,
        weights: Container[int],
        watched: Container[str] | None = None,
    ) -> None:
        self.mode = mode
        self.observer = observer
        self.cache = cache
        self.reusable_calls = reusable_calls
        self.earlier = earlier
        self.weights = weights
        self.watched = watched
        self.effects: SideEffects | None = None
        self.calls: defaultdict[str, int] = defaultdict(int)
        self.inside: list[str] = []
        self.began: list[int] = []
        self.finished: list[str] = [] if cache is None else cache.names
        self.spans: list[int] = []
        self.observing_seconds = 0.0

    def begin(self, name: str, args: Any, kwargs: Any) -> None:
        """A module is called."""
        self.inside.append(name)
        self.began.append(len(self.finished))
        if self.effects is not None:
            self.effects.begin(args, kwargs)
        self.mode.module = name

    def watches(self, name: str) -> bool:
        """Whether what a module returns is observed."""
        return self.watched is None or name in self.watched

    def earlier_call(self, name: str) -> ModuleCall | None:
        """The call of an earlier pass whose output is what the module would return now."""
        index = self.reusable_calls.get((name, self.calls[name])) if self.reusable_calls else None
        return None if index is None or self.earlier is None else self.earlier.calls[index]

    def finish(self, name: str, output: Any) -> None:
        """A module has returned, or an earlier output has replaced its own."""
        while self.inside.pop() != name:
            self.began.pop()  # it raised, and what called it went on
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
        """Take in what a watched module returned, or all that an earlier output replaces. began: how many calls had finished when
        it began.
        """
        call = self.calls[name]
        index = self.reusable_calls.get((name, call)) if self.reusable_calls else None
        if index is None or self.earlier is None:
            tensor = first_tensor(output)
            if type(output) is tuple and (chosen := _integers(output)) is not None:
                self.observer.take_choice(name, call, chosen)
            observed = self.observer(name, call, tensor) if tensor is not None else None
            cache = self.cache
            if cache is not None:
                span = began, len(self.finished)
                if cache.only is None or name in cache.only:
                    cache.add(record_call(name, call, span, output, observed, self.weights))
                else:
                    cache.count(name, call, span, observed)
            self.calls[name] = call + 1
            self.finished.append(name)
            self.spans.append(began)
            return
        # Everything that had finished inside it counts as finished again, with what was observed of it.
        for same in self.earlier.within(index):
            self.observer.replay(same.module, same.observed)
            self.calls[same.module] += 1
            if self.cache is not None:
                self.cache.add(same)
        whole = self.earlier.calls[index]
        self.finished += self.earlier.names[whole.began_after : whole.ended_after + 1]


def _integers(outputs: tuple[Any, ...]) -> torch.Tensor | None:
    """The first tensor of integers with two dimensions or more."""
    for each in outputs:
        if isinstance(each, torch.Tensor) and each.dtype in (torch.int64, torch.int32) and each.ndim >= 2:
            return each
    return None
