"""Sentences about the states of recurrent layers that a recipe names."""

from __future__ import annotations

from dtype_engine.core.kv_formats import may_have, may_name_caches, names_states_alone, why_no_state
from dtype_engine.core.text import printable
from dtype_engine.core.tree import Tree
from dtype_engine.core.units import plural
from dtype_engine.recipe.plan import Plan, select


def state_notices(tree: Tree, plan: Plan) -> tuple[str, ...]:
    """Return a notice for each rule that names the caches of a model with recurrent layers, such as `*.kv_cache=fp8`, and leaves
    their states as they are, because states can't have the rule's format.
    """
    if not tree.kv_cache.states:
        return ()
    notices = []
    for rule, taken in zip(plan.recipe.rules, plan.selections, strict=True):
        if not may_name_caches(rule.pattern) or names_states_alone(rule.pattern) or not taken.caches:
            continue
        named = set(select(tree, rule.pattern).caches) - set(taken.caches)
        states = [name for name in named if not may_have(name.rpartition(".")[2], rule.dtype)]
        if states:
            notices.append(
                f"{printable(str(rule))} leaves {plural(len(states), 'recurrent state')} as they are: {why_no_state(rule.dtype)}"
            )
    return tuple(notices)
