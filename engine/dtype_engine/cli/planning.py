"""The plan of the rules on the command line, the same for every command that runs nothing."""

from __future__ import annotations

from dataclasses import dataclass

from dtype_engine.checkpoint import Checkpoint
from dtype_engine.checkpoint.source import Source
from dtype_engine.cli.options import preset_asked, with_preset
from dtype_engine.core.options import Options
from dtype_engine.core.tree import Tree
from dtype_engine.recipe import Plan, Recipe, make_plan, require_matches


@dataclass(frozen=True, slots=True)
class Planned:
    """A model without its weights, and the plan of a recipe for it. `checkpoint`: the headers, None of a Python source."""

    checkpoint: Checkpoint | None
    tree: Tree
    plan: Plan


def planned(source: Source, recipe: Recipe, options: Options) -> Planned:
    """The plan of a recipe, after the rules of a preset that was asked for.

    Headers alone are enough where there are no rules. Rules go by the classes, ties and names of the architecture, whose
    import takes seconds. Raises UserError, also for a rule that takes nothing or whose module classes are not known.
    """
    checkpoint = source.open()
    if checkpoint is not None and not recipe.rules and preset_asked() is None and options.architecture is None:
        return Planned(checkpoint, tree := checkpoint.tree(), make_plan(tree, recipe))
    from dtype_engine.runtime.model.describe import describe

    tree = describe(source, options, checkpoint).tree
    recipe = with_preset(recipe, tree)
    require_matches(tree, recipe)
    return Planned(checkpoint, tree, make_plan(tree, recipe))
