"""What forward passes have shown of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dtype_engine.runtime.passes.side_effects import SideEffects


@dataclass
class ModelBehavior:
    """What is known of one model from the passes that were run over it, so that each thing is found out once.

    A session has one, which all that run passes over its model share. A new one is always right: it only knows less.
    """

    observed: bool = False
    """Whether a pass was watched for side effects: without one the next two fields say nothing."""
    writers: set[str] = field(default_factory=set)
    """Modules that change what they are given: an output that one returned before can't take the place of calling it."""
    stateful: bool = False
    """Whether calls depend on more than what they are given: on tensors that the model keeps, or on random numbers."""

    def add_effects(self, effects: SideEffects) -> None:
        """Take in what a pass did apart from returning its output."""
        self.observed = True
        self.writers |= effects.writers
        self.stateful |= effects.drew_numbers()


def earliest(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """The first uses of both; the smaller count where a weight has two."""
    return {**one, **{name: min(count, one.get(name, count)) for name, count in other.items()}}
