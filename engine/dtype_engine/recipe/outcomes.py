"""What every preset would do to a model, before any is put in force."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dtype_engine.core.errors import UserError
from dtype_engine.core.tree import Tree
from dtype_engine.recipe.plan import make_plan
from dtype_engine.recipe.presets import PRESETS, Preset
from dtype_engine.recipe.rules import Recipe


@dataclass(frozen=True, slots=True)
class Outcome:
    """A preset on one tree. `recipe` is None where it has nothing to do there, and `reason` says why.

    tensors: those whose dtype would be another than the stored one. Bytes are of the whole model.
    """

    preset: Preset
    recipe: Recipe | None
    reason: str = ""
    tensors: int = 0
    stored_bytes: int = 0
    planned_bytes: int = 0
    needs_classes: bool = False
    """It has nothing to do because it goes by module classes, and those are not known."""


def outcomes(tree: Tree) -> Iterator[Outcome]:
    """One after the other, in the order of `PRESETS`: each takes a while on a very large model."""
    for preset in PRESETS.values():
        try:
            recipe = preset.recipe(tree)
        except UserError as error:
            unknown = preset.needs_classes and not tree.has_classes
            yield Outcome(preset, None, str(error), needs_classes=unknown)
            continue
        plan = make_plan(tree, recipe)
        changed = sum(plan.dtypes[name] != tensor.dtype for name, tensor in tree.tensors.items())
        yield Outcome(preset, recipe, "", changed, plan.stored_bytes, plan.planned_bytes)
