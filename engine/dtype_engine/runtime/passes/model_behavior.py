"""Facts about a model that its forward passes have shown, such as which modules change their arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from dtype_engine.runtime.passes.side_effects import SideEffects


@dataclass
class ModelBehavior:
    """Facts about one model that its passes have shown, such as which modules change their arguments, kept so that each fact is
    determined only once.

    All measurements of a session share one instance. A new instance is always valid; it only contains fewer facts.
    """

    observed: bool = False
    """Whether a pass was checked for side effects. Before that, `writers` and `stateful` are not meaningful."""
    writers: set[str] = field(default_factory=set)
    """Names of modules that change their arguments. Their calls must not be skipped, because their changes would be missing."""
    stateful: bool = False
    """Whether module outputs depend on more than the arguments, such as on tensors that the model updates or on random numbers."""

    cache_amax: dict[str, torch.Tensor] = field(default_factory=dict)
    """The largest |value| of each head in the reference over all inputs, float32 [heads], by the name of a KV cache's tensor. It is
    empty until a format with calibrated scales needs it.
    """

    def add_effects(self, effects: SideEffects) -> None:
        """Add the side effects that were detected in one pass to these facts."""
        self.observed = True
        self.writers |= effects.writers
        self.stateful |= effects.drew_numbers()


def earliest(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """Merge two mappings that say how many module calls precede the first use of each weight. A weight in both mappings gets the
    smaller number.
    """
    return {**one, **{name: min(count, one.get(name, count)) for name, count in other.items()}}
