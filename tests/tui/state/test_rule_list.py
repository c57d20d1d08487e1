"""The list of rules: what moves, and what is left out of the recipe."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dtype_engine.recipe import Rule
from dtype_tui.state.rule_list import RuleList

A, B, C = (Rule(name, "bfloat16") for name in "abc")
THREE = RuleList.of((A, B, C))


def test_disabled_rule_keeps_its_place_in_the_list_but_not_in_the_recipe() -> None:
    off = THREE.toggled(1)
    assert off.recipe.rules == (A, C)
    assert off.indices == (0, None, 1)
    assert [row.rule for row in off.rows] == [A, B, C]
    assert off.toggled(1) == THREE


def test_rules_are_removed_by_their_index_in_the_recipe() -> None:
    off = THREE.toggled(0)
    assert [row.rule for row in off.without([1]).rows] == [A, B]
    assert off.without([1]).recipe.rules == (B,)


def test_new_rule_replaces_an_enabled_one_with_its_pattern() -> None:
    newer = Rule("a", "float16")
    assert THREE.then(newer).recipe.rules == (B, C, newer)
    assert [row.rule for row in THREE.toggled(0).then(newer).rows] == [A, B, C, newer]


@given(st.integers(0, 2), st.integers(-3, 3))
def test_moved_rule_keeps_the_order_of_the_others(row: int, step: int) -> None:
    moved = THREE.moved(row, step)
    place = max(0, min(2, row + step))
    assert moved.rows[place] == THREE.rows[row]
    assert [each for each in moved.rows if each != THREE.rows[row]] == [
        each for each in THREE.rows if each != THREE.rows[row]
    ]


def test_row_of_the_rule_list_can_be_changed_or_deleted() -> None:
    assert THREE.without_row(1).recipe.rules == (A, C)
    assert THREE.toggled(1).with_rule(1, Rule("d", "int8")).toggled(1).recipe.rules == (A, Rule("d", "int8"), C)
