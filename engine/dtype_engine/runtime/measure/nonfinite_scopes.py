"""Chooses the rules to try against infinite and NaN values: for sets of weights near where they arise, smallest first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from dtype_engine.core import dtypes
from dtype_engine.core.tree import Tree, ancestors, is_number
from dtype_engine.recipe import Recipe, Rule, make_plan
from dtype_engine.recipe.minimize import minimize

Scope = tuple[Rule, ...]
"""A set of rules that are tried together as a remedy against non-finite values."""


@dataclass(frozen=True, slots=True)
class Magnitudes:
    """The largest |values| in a reference run, which show the weights and modules that need a dtype of larger range."""

    weights: Mapping[str, float]
    """By weight name: the largest |value| of the activations that go into or come out of the weight's operations."""
    modules: Mapping[str, float]
    """By module name: the largest |value| that an operation in the module's own code returns."""


def scopes(
    tree: Tree,
    recipe: Recipe,
    module: str,
    weights: tuple[str, ...],
    sources: tuple[str, ...],
    largest: float,
    dtype: str,
    reached: Magnitudes,
) -> list[Callable[[], Scope]]:
    """Return functions that make the sets of rules to try, from narrow to wide. Some take seconds for a large model, so a function
    should be called only when all before it have failed.

    The operation where the values arise is the culprit. Casts to bfloat16, which has float32's range in two bytes, are tried for
    the following, in this order:

    - the culprit's weight (first to float64 if float32 can't hold its values), or the weights of the operations before it;
    - the culprit's module;
    - the weights of the operations before it, and those in their place wherever such a module has values beyond the dtype's range
      in the reference run;
    - all weights of the culprit's dtype whose operations have values beyond the dtype's range in the reference run;
    - each module above the culprit's; in a list of numbered layers, the culprit's layer is followed by it with all later ones;
    - all weights of the culprit's dtype;
    - the whole model, for which float32 is tried last.

    recipe: the rules under which the values arise. module, weights, sources, largest, dtype: those of the culprit, or empty.
    reached: the largest |values| in the reference run.
    """
    own = [_rule(weights[0], "bfloat16")] if len(weights) == 1 else []
    if own and largest > torch.finfo(torch.float32).max:
        own.insert(0, _rule(weights[0], "float64"))
    around = [_rule(pattern, "bfloat16") for pattern in _around(tree, module)]
    planned = make_plan(tree, recipe).dtypes
    narrow = [name for name, chosen in planned.items() if chosen == dtype and tree.tensors[name].castable]
    row = dtypes.BY_NAME.get(dtype)
    beyond = _beyond(narrow, row.max, reached) if row is not None else []
    before = [name for name in narrow if name in sources]
    alike = _in_the_same_place(before, module, row.max, reached, narrow) if row is not None else before
    return [
        *own,
        *([partial(_in_bfloat16, tree, recipe, before)] if before else []),
        *around[:1],
        *([partial(_in_bfloat16, tree, recipe, alike)] if alike != before else []),
        *([partial(_in_bfloat16, tree, recipe, beyond)] if beyond else []),
        *around[1:],
        *([partial(_in_bfloat16, tree, recipe, narrow)] if narrow else []),
        _rule("*", "bfloat16"),
        _rule("*", "float32"),
    ]


def _rule(pattern: str, dtype: str) -> Callable[[], Scope]:
    return lambda: (Rule.make(pattern, dtype),)


def _in_bfloat16(tree: Tree, recipe: Recipe, names: list[str]) -> Scope:
    return minimize(tree, dict.fromkeys(names, "bfloat16"), recipe).rules


def _beyond(names: list[str], limit: float, reached: Magnitudes) -> list[str]:
    """Return the weights among `names` that meet values beyond `limit` in the reference run, either in their own operations or in
    the own code of a module that contains them.
    """
    modules = tuple(f"{module}." for module, largest in reached.modules.items() if module and largest > limit)
    return [name for name in names if reached.weights.get(name, 0.0) > limit or name.startswith(modules)]


def _in_the_same_place(
    before: list[str], module: str, limit: float, reached: Magnitudes, names: list[str]
) -> list[str]:
    """Return the weights among `names` that have the place of one in `before` beside another module, whose own code has values
    beyond `limit` in the reference run. A place is a weight's path from the last module that contains both it and the culprit's.
    """
    found = set(before)
    for name in before:
        above = next((f"{each}." for each in ancestors(f"{module}.") if name.startswith(f"{each}.")), "")
        culprit, weight = f"{module}.".removeprefix(above), name.removeprefix(above)
        others = (f"{other}." for other, largest in reached.modules.items() if other and largest > limit)
        found |= {other.removesuffix(culprit) + weight for other in others if f".{other}".endswith(f".{culprit}")}
    return [name for name in names if name in found]


def _around(tree: Tree, module: str) -> Iterator[str]:
    """Yield a pattern for a module and for each module above it. After a numbered layer, also yield one for this layer and all
    later ones.
    """
    name = module
    while name:
        yield name
        above, _, last = name.rpartition(".")
        node = tree.modules.get(above)
        if is_number(last) and node is not None:
            numbers = [int(label) for child in node.children.values() if is_number(label := child.label)]
            if numbers and max(numbers) > int(last):
                yield f"{above + '.' if above else ''}{{{last}..{max(numbers)}}}"
        name = above
