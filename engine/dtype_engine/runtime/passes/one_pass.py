"""The options and the result of one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from dtype_engine.core.execution import PLAIN, Execution
from dtype_engine.runtime.modes.kv_cache import CacheWatcher
from dtype_engine.runtime.modes.weight_mode import WeightMode
from dtype_engine.runtime.passes.kept_positions import AttendedPositions
from dtype_engine.runtime.passes.output_cache import OutputCache

Output = TypeVar("Output")


@dataclass(frozen=True, slots=True)
class PassOptions:
    """What a forward pass does in addition to running the model: by default, nothing."""

    watched: frozenset[str] | None = None
    """Names of the modules whose outputs the observer receives. If None, all modules."""
    learns: bool = False
    """Whether to detect side effects and record them in the model's `ModelBehavior`."""
    cache_bytes: int = 0
    """Maximum number of bytes of module outputs to keep for a later pass. If 0, none are kept."""
    cached: frozenset[str] | None = None
    """Names of the modules whose outputs are kept for a later pass. If None, those of all watched modules."""
    earlier: OutputCache | None = None
    """Module outputs of an earlier pass over the same input, which are reused where possible. If none can be reused, all are
    released.
    """
    prefix: int = 0
    """For `ForwardRunner.partial`: how many calls at the start of the earlier pass have outputs that can't have changed."""
    around: Callable[[WeightMode], AbstractContextManager[object]] | None = None
    """A function that gets the mode of the forward pass, and returns a context manager that is entered before this mode."""
    caches: CacheWatcher | None = None
    """Receives all keys and values that the pass writes into KV caches, for example to calibrate scales. The pass itself then
    rounds no cache. If None, a pass with cast weights rounds its caches as the recipe says.
    """
    graph: bool = False
    """Whether the pass may record an autograd graph, in which weights are constants."""
    amax: Mapping[str, torch.Tensor] | None = None
    """The largest |value| of each head, float32 [heads], keyed by the name of the cache tensor, with which `ForwardRunner.partial`
    rounds KV caches. If None, the values of the reference run are used.
    """
    execution: Execution = PLAIN
    """How torch executes the pass. How inputs are grouped, as in a batch, has no effect here."""


@dataclass(slots=True)
class PassResult(Generic[Output]):
    """What a forward pass returned, and what was observed in it."""

    output: Output
    seconds: float
    """Wall time in seconds, without the time spent on observers. Reused module calls take no time."""
    finished: list[str]
    """The module names of all module calls, in the order in which the calls ended."""
    spans: list[int]
    """For each call in `finished`, how many calls had ended when it began. Incomplete if some modules are unwatched."""
    first_use: dict[str, int]
    """How many module calls had ended before a weight was first used, keyed by the weight's name."""
    attended: AttendedPositions
    """The padding masks that the model passed to torch's attention modules (`nn.MultiheadAttention`)."""
    added: bool
    """Whether the forward pass did more than plain torch would: it dequantized a weight, or cast an operation's arguments."""
    reused: bool = False
    """Whether outputs of an earlier pass replaced some module calls."""
    cache: OutputCache | None = None
    """The module outputs kept for a later pass."""
    unseen: frozenset[str] = frozenset()
    """Names of cast weights that a candidate run used in no intercepted call: it does not reach them, or uses them in another
    thread or in a function of TorchScript.
    """
    left_wide: frozenset[str] = frozenset()
    """Names of operations that multiplied a quantized weight by an activation that should, but could not be rounded."""
    overflowing: frozenset[str] = frozenset()
    """Names of states of recurrent layers with values that became infinite in their format."""
