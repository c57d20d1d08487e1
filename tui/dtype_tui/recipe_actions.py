"""What puts rules in force in the app, and what is said about them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtype_engine.core.errors import PatternError, UserError
from dtype_engine.recipe import Recipe, Rule, explain_no_match

if TYPE_CHECKING:
    from dtype_tui.app import DtypeApp


def add(app: DtypeApp, rule: Rule) -> None:
    """Put one more rule in force, and say what it takes against the model's wishes; one that takes nothing is refused."""
    experiment = app.experiment
    try:
        refused = experiment.refusal(rule)
    except PatternError as error:
        app.say(str(error), "error")
        return
    if refused is not None:
        app.say(refused, "warning")
        return
    if not experiment.push(experiment.recipe.then(rule)):
        app.say(f"{rule} is in force already", "information")
        return
    app.recipe_changed()
    warn_unmatched(app)
    broken = experiment.broken_islands(len(experiment.recipe) - 1)
    if broken:
        more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        app.say(f"{broken[0]}{more} should stay in float32, as the model's own code declares", "warning")


def warn_unmatched(app: DtypeApp) -> None:
    """Say which rules take nothing."""
    experiment = app.experiment
    plan = experiment.plan
    for place in plan.too_slow:
        app.say(
            f"rule {place + 1}: {experiment.recipe.rules[place].pattern} takes too long to match: simplify it",
            "warning",
        )
    for place in plan.unmatched:
        pattern = experiment.recipe.rules[place].pattern
        app.say(f"rule {place + 1}: {explain_no_match(experiment.tree, pattern, plan.selections[place])}", "warning")


def drop(app: DtypeApp) -> None:
    """Drop the rules of the node under the cursor: those that take nothing else."""
    inside, beyond = app.experiment.rules_within(app.tree_view.current.name)
    if inside:
        app.experiment.push(app.experiment.recipe.without(inside))
        app.recipe_changed()
    elif beyond:
        app.say(
            f"rule {beyond[-1] + 1} reaches beyond this node; go to a node above it, or cast this one (8: as stored)",
            "warning",
        )
    else:
        app.say("no rule takes this node", "information")


def remedy(app: DtypeApp) -> None:
    """Apply the rule that makes an output finite again, if there is one, else those that keep values which casts lose."""
    experiment = app.experiment
    found, kept = experiment.nonfinite, experiment.loss_remedy
    if found is not None and found.remedy is not None:
        app.add_rule(Rule.parse(found.remedy))
    elif kept is not None:
        recipe = experiment.recipe
        for rule in kept.rules:
            recipe = recipe.then(Rule.parse(rule))
        if experiment.push(recipe):
            app.recipe_changed()
    else:
        app.say(found.reason if found is not None else "there is nothing to mend", "information")


def replace_all(app: DtypeApp, recipe: Recipe) -> None:
    """Put the recipe of a preset in force, in place of all rules."""
    if app.experiment.push(recipe):
        app.recipe_changed()
    else:
        app.say("this preset is in force already", "information")


def start_with(app: DtypeApp, recipe: Recipe, preset: str | None) -> None:
    """Begin with a recipe, after the rules of a preset where one was asked for."""
    if app.experiment.push(recipe):
        app.engine.set_recipe(recipe)
    app.preset_wanted, app.after_preset = preset, recipe
    if preset is None:
        return
    from dtype_engine.recipe.presets import PRESETS  # not for the first paint

    if app.experiment.tree.has_classes or (not PRESETS[preset].needs_classes and app.has_tree):
        start_with_preset(app)


def start_with_preset(app: DtypeApp) -> None:
    """Put the preset in force that was asked for at the start, once."""
    if app.preset_wanted is None:
        return
    from dtype_engine.recipe.presets import PRESETS

    name, app.preset_wanted = app.preset_wanted, None
    try:
        made = PRESETS[name].recipe(app.experiment.tree)
    except UserError as error:
        app.say(str(error), "warning")
        return
    if app.experiment.push(Recipe((*made.rules, *app.after_preset.rules))):
        app.engine.set_recipe(app.experiment.recipe)
