"""Recipes: patterns, rules, the tensors of a model that the rules select, and the plan, which gives the dtype of every tensor."""

from dtype_engine.recipe.pattern import compile_pattern, generalisations
from dtype_engine.recipe.plan import (
    Plan,
    RuleEffect,
    Selection,
    dtype_given,
    explain_no_match,
    llama_notices,
    make_plan,
    require_matches,
    rules_in_doubt,
    select,
    tensor_bytes,
    uncast_words,
)
from dtype_engine.recipe.rules import History, Recipe, Rule

__all__ = [
    "History",
    "Plan",
    "Recipe",
    "Rule",
    "RuleEffect",
    "Selection",
    "compile_pattern",
    "dtype_given",
    "explain_no_match",
    "generalisations",
    "llama_notices",
    "make_plan",
    "require_matches",
    "rules_in_doubt",
    "select",
    "tensor_bytes",
    "uncast_words",
]
