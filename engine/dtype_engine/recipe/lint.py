"""Compares which tensors a recipe's patterns match in this program and in another tool that gets the same patterns."""

from __future__ import annotations

from dataclasses import dataclass, field

from dtype_engine.core.errors import PatternError, TooSlow
from dtype_engine.core.regexes import time_limit
from dtype_engine.recipe.kv_serving import CacheServing, cache_serving
from dtype_engine.recipe.plan import MATCHING_S
from dtype_engine.recipe.targets.base import Context, Match, Target


@dataclass(frozen=True, slots=True)
class RuleComparison:
    """The tensors that one rule's pattern matches in this program and in another tool."""

    pattern: str
    dtype: str
    here: int
    """Number of tensors that the rule matches in this program."""
    there: int
    """Number of tensors that the rule would match in the other tool."""
    only_here: tuple[str, ...]
    """Canonical names of the tensors that the rule matches only in this program, without those counted in `beyond`."""
    only_there: tuple[str, ...]
    """Canonical names of the tensors that the rule would match only in the other tool."""
    beyond: int
    """Number of tensors that the rule matches in this program, and that no pattern of the other tool can change."""
    problem: str | None = None
    """Why the other tool matches fewer tensors, or None if the reason is unknown."""

    @property
    def differs(self) -> bool:
        return bool(self.only_here or self.only_there)


@dataclass(frozen=True, slots=True)
class Lint:
    """A comparison of how this program and one other tool (the target) match the patterns of a recipe."""

    target: str
    matcher: str
    """How the target matches patterns, such as by `re.match` on module names."""
    rules: tuple[RuleComparison, ...]
    overruled: tuple[tuple[str, str, str], ...] = ()
    """Tensors for which the target applies another matching rule: (tensor, pattern that wins here, pattern that wins there)."""
    caches: CacheServing = field(default_factory=CacheServing)
    """For llama.cpp: how to give KV caches the recipe's formats. Empty for other targets."""

    @property
    def patterns_differ(self) -> bool:
        return bool(self.overruled) or any(rule.differs for rule in self.rules)

    @property
    def differs(self) -> bool:
        return self.patterns_differ or bool(self.caches.problems)


def lint(context: Context, target: Target) -> Lint:
    """Compare what each rule matches in this program and in `target`. Rules only for KV caches are left out. Raises TooSlow."""
    plan, matchable = context.plan, target.matchable(context)
    compared: list[RuleComparison] = []
    there_by_rule: list[frozenset[str]] = []
    with time_limit(MATCHING_S):
        for rule, selection in zip(plan.recipe.rules, plan.selections, strict=True):
            if selection.caches and not selection.tensors:
                there_by_rule.append(frozenset())
                continue
            try:
                taken = target.match(context, rule.pattern)
            except TooSlow:
                raise
            except PatternError as error:
                taken = Match(problem=f"not a regular expression: {error}")
            here, there = frozenset(selection.tensors), taken.tensors & matchable
            there_by_rule.append(there)
            missed, extra = (here & matchable) - there, there - here
            compared.append(
                RuleComparison(
                    rule.pattern, rule.dtype, len(here), len(there),
                    _in_order(context, missed), _in_order(context, extra), len(here - matchable),
                    taken.problem if missed else None,
                )
            )  # fmt: skip
    caches = plan.caches if target.name == "llama.cpp" else {}
    return Lint(
        target.name, target.matcher, tuple(compared), _overruled(context, target, there_by_rule),
        cache_serving(context.tree, caches, target.name),
    )  # fmt: skip


def _overruled(
    context: Context, target: Target, there_by_rule: list[frozenset[str]]
) -> tuple[tuple[str, str, str], ...]:
    """Find tensors that the same rules match in both programs, but for which the target applies a rule with another dtype. Returns
    (tensor, pattern that wins here, pattern that wins in the target) for each. there_by_rule: for each rule, the tensors that it
    matches in the target.
    """
    if target.precedence is None:
        return ()
    rules = context.plan.recipe.rules
    here_by_rule = [frozenset(selection.tensors) for selection in context.plan.selections]
    overruled: list[tuple[str, str, str]] = []
    for name in context.tree.tensors:
        mine = [index for index, taken in enumerate(here_by_rule) if name in taken]
        theirs = [index for index, taken in enumerate(there_by_rule) if name in taken]
        if not mine or mine != theirs:
            continue
        winner = _applied(target, [(index, rules[index].pattern) for index in theirs])
        if rules[winner].dtype != rules[mine[-1]].dtype:
            overruled.append((name, rules[mine[-1]].pattern, rules[winner].pattern))
    return tuple(overruled)


def _applied(target: Target, matching: list[tuple[int, str]]) -> int:
    """Return the index of the rule that the target applies. matching: (index, pattern) of the rules that match a tensor."""
    if target.precedence == "last":
        return matching[-1][0]
    exact = [index for index, pattern in matching if not pattern.startswith("re:")]
    return exact[0] if exact and target.precedence == "exact first" else matching[0][0]


def _in_order(context: Context, names: frozenset[str]) -> tuple[str, ...]:
    return tuple(name for name in context.tree.tensors if name in names)
