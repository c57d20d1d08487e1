"""Recipes: patterns, rules, what they take of a tree, and the plan that comes of it. Never imports torch."""

from .pattern import Pattern, compile_pattern, generalisations
from .plan import Plan, Selection, make_plan, no_match, require_matches, select, tensor_bytes
from .rules import History, Recipe, Rule

__all__ = [
    "History",
    "Pattern",
    "Plan",
    "Recipe",
    "Rule",
    "Selection",
    "compile_pattern",
    "generalisations",
    "make_plan",
    "no_match",
    "require_matches",
    "select",
    "tensor_bytes",
]
