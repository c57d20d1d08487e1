"""What forward passes have shown of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dtype_engine.runtime.model.live import Weight
from dtype_engine.runtime.passes.side_effects import SideEffects


@dataclass
class ModelBehavior:
    """What is known of one model from the passes that were run over it, so that each thing is found out once.

    A session has one, which all that run passes over its model share. A new one is always right: it only knows less.
    """

    observed: bool = False
    """Whether a pass was watched for side effects: without one the next fields say nothing."""
    writers: set[str] = field(default_factory=set)
    """Modules that change what they are given: an output that one returned before can't take the place of calling it."""
    stateful: bool = False
    """Whether calls depend on more than what they are given: on tensors that the model keeps, or on random numbers."""
    overwritten: list[str] = field(default_factory=list)
    """The weights that the model's own code writes to in a pass."""
    carries_over: list[str] = field(default_factory=list)
    """Classes of modules that keep tensors from one pass for the next, and can't be given back what they had."""

    def add_effects(self, effects: SideEffects, weights: Mapping[int, Weight]) -> None:
        """Take in what a pass did apart from returning its output. weights: the model's, by `id` of their tensors."""
        self.observed = True
        self.writers |= effects.writers
        self.stateful |= effects.is_stateful()
        names = (weights[id(tensor)].info.name for tensor in effects.overwritten() if id(tensor) in weights)
        self.overwritten = list(dict.fromkeys([*self.overwritten, *names]))

    def add_carried_over(self, classes: Iterable[str]) -> None:
        """Take in the classes of modules that kept tensors of a pass."""
        self.carries_over = list(dict.fromkeys([*self.carries_over, *classes]))

    def notices(self) -> tuple[str, ...]:
        """What a reader of figures has to know: that passes do not begin alike."""
        notices = []
        for verb, names in (("writes to", self.overwritten), ("keeps tensors in", self.carries_over)):
            if names:
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                notices.append(
                    f"the model {verb} {names[0]}{more} while it runs: each pass begins with what the last one left"
                )
        return tuple(notices)


def earliest(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """The first uses of both; the smaller count where a weight has two."""
    return {**one, **{name: min(count, one.get(name, count)) for name, count in other.items()}}
