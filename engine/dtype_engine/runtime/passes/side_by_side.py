"""Runs several forward passes of one model side by side, so that each block of its weights is read only once for all of them. A
block is a module, such as a layer.

Each pass runs in a thread, but only one thread runs at a time: before a block, a pass waits until the other passes have reached it,
too. The model's own code runs unchanged, so this works however it calls its blocks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

import torch

from dtype_engine.core.callbacks import Fixed, ignore
from dtype_engine.core.cancellation import never
from dtype_engine.core.errors import Cancelled
from dtype_engine.runtime.modes.weight_mode import WeightMode
from dtype_engine.runtime.weights.budget import MemoryBudget

T = TypeVar("T")
_ALWAYS = Fixed("always", True)


class NotIndependent(Cancelled):
    """Raised if a forward pass changes the model's state. Other passes that run side by side would see these changes."""


class SideBySide:
    """Runs several forward passes that take turns: before each block, the running pass stops and another pass is resumed.

    suspend: called when a pass stops before a block. Returns a function that is called when this pass is resumed. ended: called
    when all passes have run a block, while the values that it has read are still kept.

    Attributes:
        changed: returns whether the running pass has changed the model's state.
        kept: tensors of the model that the modes of all passes watch for changes (`WeightMode.kept`).
    """

    def __init__(
        self, memory: MemoryBudget, suspend: Callable[[], Callable[[], None]], ended: Callable[[], object] = ignore
    ) -> None:
        self.changed: Callable[[], bool] = never
        self.kept: Sequence[torch.Tensor] = ()
        self._memory = memory
        self._suspend = suspend
        self._ended = ended
        self._shared = ExitStack()
        self._entered: dict[str, Any] = {}
        self._modes: dict[int, WeightMode] = {}
        self._turns: list[threading.Semaphore] = []
        self._waiting: dict[int, tuple[int, int, str]] = {}
        """Where each waiting pass stopped: how often it has entered the next block, the order of this block among all, its name."""
        self._calls: list[dict[str, int]] = []
        self._order: dict[str, int] = {}
        self._running = -1
        self._errors: list[BaseException] = []

    @property
    def wrote(self) -> bool:
        """Whether any pass has changed a weight or a tensor in `kept`."""
        return any(mode.wrote for mode in self._modes.values())

    def begin(self, mode: WeightMode) -> None:
        """Set the torch-function mode of the running pass."""
        self._modes[self._running] = mode
        mode.kept = self.kept

    def share(self, name: str, context: Callable[[], AbstractContextManager[T]]) -> T:
        """Return what a context manager yields. The first pass that asks for `name` enters it, and all passes share it until they
        end.
        """
        if name not in self._entered:
            self._entered[name] = self._shared.enter_context(context())
        return self._entered[name]  # type: ignore[no-any-return]

    def run(self, works: Sequence[Callable[[], T]]) -> list[T]:
        """Call all functions in `works`, each of which runs one forward pass, and return their results. Raises the first error."""
        results: list[Any] = [None] * len(works)
        self._turns = [threading.Semaphore(0) for _ in works]
        self._calls = [{} for _ in works]
        self._waiting = dict.fromkeys(range(len(works)), (-1, 0, ""))

        def work(number: int) -> None:
            self._turns[number].acquire()
            try:
                if not self._errors:
                    results[number] = works[number]()
            except BaseException as error:
                self._errors.append(error)
            self._hand_over()

        threads = [threading.Thread(target=work, args=(number,), name=f"pass {number}") for number in range(len(works))]
        for thread in threads:
            thread.start()
        with self._shared:
            self._hand_over()
            try:
                for thread in threads:
                    thread.join()
            except BaseException as error:  # such as an interrupt, which only the main thread gets
                self._errors.insert(0, error)
                self._memory.cancelled = _ALWAYS  # so that the running pass stops at its next weight
            for thread in threads:
                thread.join()
            try:
                if not self._errors:
                    self._ended()
            finally:
                self._memory.leave()
        if self._errors:
            raise self._errors[0]
        return results

    def enter(self, block: str) -> float:
        """Wait for the running pass's turn to run a block. Returns the seconds that it waited. Raises NotIndependent if the pass
        changes the model's state, and Cancelled if another pass failed.
        """
        number, started = self._running, time.perf_counter()
        if number == 0 and self.changed():  # one pass is enough to know
            raise NotIndependent
        calls = self._calls[number]
        calls[block] = calls.get(block, -1) + 1
        self._waiting[number] = calls[block], self._order.setdefault(block, len(self._order)), block
        resume = self._suspend()
        self._hand_over()
        self._turns[number].acquire()
        if self._errors:
            raise Cancelled
        resume()
        if self._memory.inside not in ("", block):
            self._ended()
        self._memory.enter(block)
        return time.perf_counter() - started

    def _hand_over(self) -> None:
        """Resume a waiting pass: one that waits for the current block, or else the pass that has entered its next block the fewest
        times.
        """
        if not self._waiting:
            return
        inside = self._memory.inside

        def rank(number: int) -> tuple[bool, int, int, int]:
            calls, order, block = self._waiting[number]
            return block != inside, calls, order, number

        self._running = min(self._waiting, key=rank)
        del self._waiting[self._running]
        self._turns[self._running].release()
