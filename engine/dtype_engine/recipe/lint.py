"""What the patterns of a recipe would take in another tool, as they stand, compared with what they take here."""

from __future__ import annotations

from dataclasses import dataclass

from dtype_engine.core.errors import PatternError, TooSlow
from dtype_engine.recipe.plan import MATCHING_S
from dtype_engine.recipe.regexes import time_limit
from dtype_engine.recipe.targets import Context, Match, Target


@dataclass(frozen=True, slots=True)
class RuleReading:
    """One rule in the other tool's matcher, by canonical tensor names.

    Only tensors that the tool's patterns can have an effect on are compared; `beyond` counts those that the rule takes
    here and no pattern there could.
    """

    pattern: str
    dtype: str
    here: int
    there: int
    only_here: tuple[str, ...]
    only_there: tuple[str, ...]
    beyond: int
    problem: str | None = None

    @property
    def differs(self) -> bool:
        return bool(self.only_here or self.only_there)


@dataclass(frozen=True, slots=True)
class Lint:
    """The readings of all rules; `overruled` are tensors for which the tool would prefer another rule than we do."""

    target: str
    matcher: str
    rules: tuple[RuleReading, ...]
    overruled: tuple[tuple[str, str, str], ...] = ()
    """(tensor, the pattern that decides here, the one that would there)"""

    @property
    def differs(self) -> bool:
        return bool(self.overruled) or any(rule.differs for rule in self.rules)


def lint(context: Context, target: Target) -> Lint:
    """Read every rule as `target` would. Raises TooSlow for patterns that take too long to match there."""
    plan, matchable = context.plan, target.matchable(context)
    readings: list[RuleReading] = []
    there_by_rule: list[frozenset[str]] = []
    with time_limit(MATCHING_S):
        for rule, selection in zip(plan.recipe.rules, plan.selections, strict=True):
            try:
                taken = target.match(context, rule.pattern)
            except TooSlow:
                raise
            except PatternError as error:
                taken = Match(frozenset(), f"no regular expression: {error}")
            here, there = frozenset(selection.tensors), taken.tensors & matchable
            there_by_rule.append(there)
            missed, extra = (here & matchable) - there, there - here
            readings.append(
                RuleReading(
                    rule.pattern, rule.dtype, len(here), len(there),
                    _in_order(context, missed), _in_order(context, extra), len(here - matchable),
                    taken.problem if missed else None,
                )
            )  # fmt: skip
    return Lint(target.name, target.matcher, tuple(readings), _overruled(context, target, there_by_rule))


def _overruled(
    context: Context, target: Target, there_by_rule: list[frozenset[str]]
) -> tuple[tuple[str, str, str], ...]:
    """Tensors that the same rules take here and there, with another winner there.

    Where a tool has no order among its patterns, there is nothing to prefer.
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
        winner = theirs[target.precedence([rules[index].pattern for index in theirs])]
        if rules[winner].dtype != rules[mine[-1]].dtype:
            overruled.append((name, rules[mine[-1]].pattern, rules[winner].pattern))
    return tuple(overruled)


def _in_order(context: Context, names: frozenset[str]) -> tuple[str, ...]:
    """Names in the model's order."""
    return tuple(name for name in context.tree.tensors if name in names)
