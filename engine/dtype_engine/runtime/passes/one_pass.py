"""The options and the result of one forward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, TypeVar

from dtype_engine.runtime.modes.weight_mode import WeightMode
from dtype_engine.runtime.passes.output_cache import OutputCache

Output = TypeVar("Output")


@dataclass(frozen=True, slots=True)
class PassOptions:
    """What a pass does in addition to running the model. With the defaults, it does nothing else."""

    watched: frozenset[str] | None = None
    """Names of the modules whose outputs the observer receives. If None, all modules."""
    learns: bool = False
    """Whether to detect side effects and record them in the model's `ModelBehavior`."""
    cache_bytes: int = 0
    """Maximum number of bytes of outputs to keep for a later pass. If 0, no cache is created."""
    cached: frozenset[str] | None = None
    """Names of the modules whose outputs are kept for a later pass. If None, those of all watched modules."""
    earlier: OutputCache | None = None
    """Outputs of an earlier pass over the same input. Those that can't have changed are reused. If none can be reused, all are
    released."""
    prefix: int | None = None
    """The number of calls at the start of `earlier` that can't have changed. Only `ForwardRunner.partial` uses it."""
    around: Callable[[WeightMode], AbstractContextManager[object]] | None = None
    """Receives the pass's mode, and returns a context manager that the pass enters before the mode."""


@dataclass(slots=True)
class PassResult(Generic[Output]):
    """The result of a pass."""

    output: Output
    seconds: float
    """Wall time in seconds, without the time spent on observers. Reused calls take no time."""
    finished: list[str]
    """The module names of all calls, in the order in which the calls ended."""
    spans: list[int]
    """For each entry of `finished`, the number of calls finished when it began. Shorter if some modules were not watched."""
    first_use: dict[str, int]
    """For each weight that was used, the number of calls that had finished before its first use."""
    added: bool
    """Whether anything ran that plain torch would not run: a weight was dequantized, or a call got arguments in other dtypes than
    those from the model."""
    reused: bool = False
    """Whether outputs of an earlier pass replaced some calls."""
    cache: OutputCache | None = None
    """The outputs kept for a later pass, or None."""
    left_wide: frozenset[str] = frozenset()
    """If activations are quantised: names of operations with a quantised weight whose input was not rounded."""
