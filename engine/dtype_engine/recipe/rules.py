"""A recipe is an ordered list of rules; a rule is a pattern and a dtype. The last rule that matches wins."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.recipe.pattern import compile_pattern


@dataclass(frozen=True, slots=True)
class Rule:
    """Everything that `pattern` takes gets `dtype`.

    Attributes:
        pattern: Names of modules or tensors, with wildcards; or `type:Class`, or `re:` and a regular expression.
        dtype: A name of `dtypes.CASTABLE_DTYPES`, or `dtypes.STORED`.

    Example:
        >>> de.Rule.parse("*.mlp=bf16")
        Rule(pattern='*.mlp', dtype='bfloat16')
    """

    pattern: str
    dtype: str

    @classmethod
    def make(cls, pattern: str, dtype: str) -> Rule:
        """Check both and bring them into their one spelling. Raises UserError."""
        return cls(compile_pattern(pattern).text, dtypes.parse_target(dtype))

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Read `PATTERN=DTYPE`. Raises UserError."""
        pattern, equals, dtype = text.rpartition("=")
        if not equals or not pattern.strip() or not dtype.strip():
            raise UserError(f"can't read the cast {text!r}: write PATTERN=DTYPE, for example '*.mlp=bfloat16'")
        return cls.make(pattern, dtype)

    def __str__(self) -> str:
        return f"{self.pattern}={self.dtype}"


@dataclass(frozen=True, slots=True)
class Recipe:
    """Rules in the order they were made. Immutable, so it can name the measurements that belong to it.

    Attributes:
        rules: The last one that takes a tensor decides.

    Example:
        >>> recipe = de.Recipe.of([de.Rule.parse("*=bf16")]).then(de.Rule.parse("*norm*=float32"))
        >>> str(recipe)
        '*=bfloat16, *norm*=float32'
    """

    rules: tuple[Rule, ...] = ()

    @classmethod
    def of(cls, rules: Iterable[Rule]) -> Recipe:
        return cls(tuple(rules))

    def then(self, rule: Rule) -> Recipe:
        """With one more rule at the end. An earlier rule with the same pattern has no say any more and goes."""
        return Recipe((*(earlier for earlier in self.rules if earlier.pattern != rule.pattern), rule))

    def without(self, indices: Iterable[int]) -> Recipe:
        """Without the rules at these indices."""
        dropped = set(indices)
        return Recipe(tuple(rule for index, rule in enumerate(self.rules) if index not in dropped))

    def __len__(self) -> int:
        return len(self.rules)

    def __str__(self) -> str:
        return ", ".join(map(str, self.rules)) or "as stored"


class RecipeHistory:
    """The recipes of a session, to go back and forth in without limit."""

    def __init__(self, recipe: Recipe = Recipe()) -> None:
        self._recipes = [recipe]
        self._at = 0

    @classmethod
    def of(cls, recipes: Iterable[Recipe], at: int) -> RecipeHistory:
        """A history that was kept: the recipes gone through, the one in force at index `at`."""
        history = cls()
        history._recipes, history._at = list(recipes), at
        return history

    @property
    def kept(self) -> tuple[tuple[Recipe, ...], int]:
        """What `of` makes the same history of."""
        return tuple(self._recipes), self._at

    @property
    def recipe(self) -> Recipe:
        """The one in force."""
        return self._recipes[self._at]

    def push(self, recipe: Recipe) -> bool:
        """Make `recipe` the one in force; whatever was undone is gone. False when it already was in force."""
        if recipe == self.recipe:
            return False
        self._recipes[self._at + 1 :] = [recipe]
        self._at += 1
        return True

    def undo(self) -> bool:
        """Go back one. False when there is nothing left to undo."""
        if self._at == 0:
            return False
        self._at -= 1
        return True

    def redo(self) -> bool:
        """Go forward again. False when nothing was undone."""
        if self._at + 1 == len(self._recipes):
            return False
        self._at += 1
        return True
