"""From a recipe and a tree to a plan: the dtype of every tensor, which rule decided it, and the bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .. import dtypes
from ..errors import UserError
from ..tree import Module, TensorInfo, Tree
from .pattern import Pattern, compile_pattern
from .rules import Recipe, Rule


@dataclass(frozen=True, slots=True)
class Selection:
    """What one pattern takes of a tree.

    `modules` were matched themselves, those left out that lie inside another; `tensors` are the castable tensors
    taken, each once, by their canonical names; `fixed` counts those that it matched and that are never cast (integers,
    booleans, parts of quantised weights, and non-persistent buffers that it does not name).
    """

    modules: frozenset[str]
    tensors: tuple[str, ...]
    fixed: int = 0

    def __len__(self) -> int:
        return len(self.tensors)


def select(tree: Tree, pattern: Pattern | str) -> Selection:
    """Everything in `tree` that a pattern takes. Raises PatternError for text that is no pattern."""
    compiled = compile_pattern(pattern) if isinstance(pattern, str) else pattern
    modules: set[str] = set()
    taken: dict[str, None] = {}
    fixed: set[str] = set()
    stack: list[Module] = [tree.root]
    while stack:
        node = stack.pop()
        if compiled.matches_class(node.class_name) or (node.name != "" and compiled.matches(node.name)):
            # All below it is taken too, whatever its names are.
            modules.add(node.name)
            for tensor in tree.below(node.name):
                if tensor.castable and (tensor.persistent or any(map(compiled.singles_out, tensor.names))):
                    taken[tensor.name] = None
                else:
                    fixed.add(tensor.name)
            continue
        prefix = f"{node.name}." if node.name else ""
        for local, tensor in node.tensors.items():
            name = prefix + local
            if not compiled.matches(name):
                continue
            if tensor.castable and (tensor.persistent or compiled.singles_out(name)):
                taken[tensor.name] = None
            else:
                fixed.add(tensor.name)
        stack.extend(reversed(node.children.values()))
    return Selection(frozenset(modules), tuple(taken), len(fixed - taken.keys()))


@dataclass(frozen=True, slots=True)
class Plan:
    """The dtype of every tensor under a recipe.

    `dtypes` has every tensor by canonical name; `decided_by` only those that a rule decided, with that
    rule's place in the recipe; `selections` has what each rule takes, in the recipe's order.
    """

    recipe: Recipe
    dtypes: Mapping[str, str]
    decided_by: Mapping[str, int]
    selections: tuple[Selection, ...]
    stored_bytes: int
    planned_bytes: int
    waiting: tuple[int, ...] = field(default=())

    def explain(self, tensor: str) -> list[tuple[int, Rule, bool]]:
        """Every rule that matches a tensor (canonical name): its place, the rule, whether it won. Last first."""
        winner = self.decided_by.get(tensor)
        return [
            (index, self.recipe.rules[index], index == winner)
            for index in reversed(range(len(self.recipe)))
            if tensor in self.selections[index].tensors
        ]

    @property
    def unmatched(self) -> list[int]:
        """Places of the rules that take nothing, those left out that wait for module classes to be known."""
        return [index for index, taken in enumerate(self.selections) if not taken and index not in self.waiting]


def make_plan(tree: Tree, recipe: Recipe) -> Plan:
    """Apply the rules in order; the last that takes a tensor wins. Untouched tensors stay as stored."""
    planned = {name: tensor.dtype for name, tensor in tree.tensors.items()}
    decided: dict[str, int] = {}
    selections: list[Selection] = []
    waiting: list[int] = []
    for index, rule in enumerate(recipe.rules):
        pattern = compile_pattern(rule.pattern)
        if pattern.by_class and not tree.has_classes:
            waiting.append(index)
        taken = select(tree, pattern)
        selections.append(taken)
        for name in taken.tensors:
            planned[name] = tree.tensors[name].dtype if rule.dtype == dtypes.STORED else rule.dtype
            decided[name] = index
    return Plan(
        recipe, planned, decided, tuple(selections), tree.stored_bytes, planned_bytes(tree, planned), tuple(waiting)
    )


def planned_bytes(tree: Tree, planned: Mapping[str, str]) -> int:
    """Bytes of parameters and persistent buffers, tied ones once, in their planned dtypes, scales included."""
    changed = 0
    for name, dtype in planned.items():
        tensor = tree.tensors[name]
        if dtype != tensor.dtype and tensor.persistent:
            changed += tensor_bytes(tensor, dtype) - tensor.nbytes
    return tree.stored_bytes + changed


def tensor_bytes(tensor: TensorInfo, dtype: str) -> int:
    """Bytes of one tensor in `dtype`: as stored, or as it would be after the cast."""
    return tensor.nbytes if dtype == tensor.dtype else dtypes.stored_bytes(tensor.shape, dtype)


def require_matches(tree: Tree, recipe: Recipe) -> None:
    """Raise UserError for the rules that take nothing, with the reason and a near name for the first of them."""
    plan = make_plan(tree, recipe)
    for place, index in enumerate(plan.unmatched):
        others = [repr(recipe.rules[other].pattern) for other in plan.unmatched[place + 1 :]]
        nor = "nor does 1 more rule" if len(others) == 1 else f"nor do {len(others)} more rules"
        more = f"; {nor} take anything: {', '.join(others[:5])}" if others else ""
        raise UserError(no_match(tree, recipe.rules[index].pattern, plan.selections[index]) + more)


def no_match(tree: Tree, pattern: str, taken: Selection | None = None) -> str:
    """Why a pattern takes nothing, in a sentence."""
    import difflib

    if taken is not None and taken.fixed:
        return (
            f"pattern {pattern!r} takes only tensors that are never cast "
            "(integers, booleans, quantised weights, or non-persistent buffers that it does not name)"
        )
    compiled = compile_pattern(pattern)
    if compiled.by_class:
        known = sorted({module.class_name for module in tree.modules.values() if module.class_name})
        wanted, prefix = pattern.removeprefix("type:"), "type:"
    else:
        known, wanted, prefix = [*tree.modules, *tree.tensors], pattern, ""
    near = difflib.get_close_matches(wanted, known[:20_000], n=1, cutoff=0.6)
    hint = f"; the nearest is {prefix}{near[0]}" if near else ""
    return f"pattern {pattern!r} matches nothing in this model{hint}"
