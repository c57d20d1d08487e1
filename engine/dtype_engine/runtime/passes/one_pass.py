"""What one forward pass is asked to do, and what it gives."""

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
    """What a pass does apart from running the model. The defaults do nothing."""

    watched: frozenset[str] | None = None
    """The modules whose outputs the observer is given; None for all."""
    learns: bool = False
    """Whether side effects are noted in the model's `ModelBehavior`."""
    cache_bytes: int = 0
    """How many bytes of outputs may be kept for a later pass; 0: there is no cache."""
    cached: frozenset[str] | None = None
    """The modules whose outputs are kept; None for all that are watched."""
    earlier: OutputCache | None = None
    """Outputs of an earlier pass over the same input: those that can't have changed are reused. It is emptied if none are."""
    prefix: int | None = None
    """How many calls of `earlier` can't have changed; None: those before the first use of a weight that was cast since."""
    around: Callable[[WeightMode], AbstractContextManager[object]] | None = None
    """Makes a context to enter outside of the pass's mode, which it is given."""


@dataclass(slots=True)
class PassResult(Generic[Output]):
    """What a pass gave."""

    output: Output
    seconds: float
    """Wall time, without what observing took. Calls that were reused took none."""
    finished: list[str]
    """The modules of its calls, in the order in which these ended."""
    spans: list[int]
    """How many calls had finished when each of `finished` began; shorter where not every module was watched."""
    first_use: dict[str, int]
    """How many calls had finished when each weight was first used."""
    added: bool
    """Whether anything ran that plain torch does not run: a weight was brought back from a storage format, or a call was made
    with other dtypes than the model gave it."""
    reused: bool = False
    """Whether outputs of an earlier pass took the place of some calls."""
    cache: OutputCache | None = None
    """The outputs that are kept for a later pass."""
    left_wide: frozenset[str] = frozenset()
    """Operations with a quantised weight whose input was not rounded, where activations are quantised."""
