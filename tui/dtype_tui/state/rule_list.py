"""The rules of a session in order, including those that the user has disabled."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import msgspec
from msgspec.structs import replace

from dtype_engine.recipe import Recipe, Rule


class ListedRule(msgspec.Struct, frozen=True):
    """A rule of a `RuleList`, enabled or disabled. A disabled rule casts nothing, and is not part of the recipe."""

    rule: Rule
    enabled: bool = True


class RuleList(msgspec.Struct, frozen=True, dict=True):
    """Rules in the order in which they apply, enabled or not. It is immutable, so that undo can restore it."""

    rows: tuple[ListedRule, ...] = ()

    @classmethod
    def of(cls, rules: Iterable[Rule]) -> RuleList:
        return cls(tuple(map(ListedRule, rules)))

    @cached_property
    def recipe(self) -> Recipe:
        return Recipe(tuple(row.rule for row in self.rows if row.enabled))

    @cached_property
    def indices(self) -> tuple[int | None, ...]:
        """For each row, the index of its rule in `recipe`, or None if the rule is disabled."""
        enabled = iter(range(len(self.rows)))
        return tuple(next(enabled) if row.enabled else None for row in self.rows)

    def then(self, rule: Rule) -> RuleList:
        """Return this list with `rule` added at the end, and without enabled rules that have the same pattern."""
        kept = (row for row in self.rows if not row.enabled or row.rule.pattern != rule.pattern)
        return RuleList((*kept, ListedRule(rule)))

    def without(self, rules: Iterable[int]) -> RuleList:
        """Return this list without the rules at these indices of `recipe`."""
        dropped = set(rules)
        return RuleList(tuple(row for row, at in zip(self.rows, self.indices, strict=True) if at not in dropped))

    def with_rule(self, row: int, rule: Rule) -> RuleList:
        return self._with_row(row, replace(self.rows[row], rule=rule))

    def toggled(self, row: int) -> RuleList:
        """Return this list with the rule in a row disabled or, if it is disabled, enabled."""
        return self._with_row(row, replace(self.rows[row], enabled=not self.rows[row].enabled))

    def without_row(self, row: int) -> RuleList:
        return RuleList((*self.rows[:row], *self.rows[row + 1 :]))

    def moved(self, row: int, step: int) -> RuleList:
        """Return this list with the rule in a row moved by `step` rows. At an end of the list, the rule stays where it is."""
        to = max(0, min(row + step, len(self.rows) - 1))
        rest = self.without_row(row).rows
        return RuleList((*rest[:to], self.rows[row], *rest[to:]))

    def _with_row(self, row: int, changed: ListedRule) -> RuleList:
        return RuleList((*self.rows[:row], changed, *self.rows[row + 1 :]))
