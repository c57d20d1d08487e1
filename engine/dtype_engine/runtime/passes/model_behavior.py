"""Remembers what forward passes have shown about a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from dtype_engine.runtime.passes.side_effects import SideEffects

Run = Literal["reference", "candidate"]


@dataclass(frozen=True, slots=True)
class Calibration:
    """The largest values in KV caches when the model ran over all inputs with unrounded caches."""

    state: object
    """What these values depend on: the run settings and, for a candidate run, the current values of all weights."""
    amax: Mapping[str, torch.Tensor]
    """The largest |value| of each head, float32 [heads], keyed by the name of the cache tensor."""


@dataclass
class ModelBehavior:
    """What forward passes have shown about one model. All measurements of a session share this object. An empty one is always
    valid.
    """

    observed: bool = False
    """Whether a forward pass was checked for side effects. Until then, `writers` and `stateful` have no meaning."""
    writers: set[str] = field(default_factory=set)
    """Names of modules that change their arguments. Their calls must not be skipped, because the changes would be missing."""
    stateful: bool = False
    """Whether module outputs depend on more than the arguments, such as on tensors that the model updates or on random numbers."""
    calibrations: dict[Run, Calibration] = field(default_factory=dict)
    """The last calibrations for reference runs and for candidate runs, if a format with calibrated scales has needed them."""

    def add_effects(self, effects: SideEffects) -> None:
        """Add the side effects that were detected in one forward pass."""
        self.observed = True
        self.writers |= effects.writers
        self.stateful |= effects.drew_numbers()
