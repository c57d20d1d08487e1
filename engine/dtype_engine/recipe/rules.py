"""Rules and recipes. A rule is a pattern and a dtype. A recipe is an ordered list of rules; the last rule that matches wins."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.core.text import Name
from dtype_engine.recipe.pattern import compile_pattern


@dataclass(frozen=True, slots=True)
class Rule:
    """Casts every tensor that `pattern` selects to `dtype`.

    Example:
        >>> de.Rule.parse("*.mlp=bf16")
        Rule(pattern='*.mlp', dtype='bfloat16')
    """

    pattern: Name
    """Names of modules or tensors, with wildcards; or `type:` and a class; or `re:` and a regular expression."""
    dtype: str
    """A name in `dtypes.CASTABLE_DTYPES`, or `dtypes.STORED`."""

    @classmethod
    def make(cls, pattern: str, dtype: object) -> Rule:
        """Return a rule made from a pattern and a dtype: a name in any spelling, or a `torch.dtype`. Raises UserError if either is
        invalid.
        """
        return cls(compile_pattern(pattern).text, dtypes.parse_target(str(dtype)))

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Parse a rule written as `PATTERN=DTYPE`. Raises UserError if the text is not such a rule."""
        pattern, equals, dtype = text.rpartition("=")
        if not equals or not pattern.strip() or not dtype.strip():
            raise UserError(f"can't read the cast {text!r}: write PATTERN=DTYPE, for example '*.mlp=bfloat16'")
        return cls.make(pattern, dtype)

    def __str__(self) -> str:
        return f"{self.pattern}={self.dtype}"


@dataclass(frozen=True, slots=True)
class Recipe:
    """Rules in the order in which they apply. It is immutable and hashable, so that measurements can be stored by recipe.

    Example:
        >>> recipe = de.Recipe.of([de.Rule.parse("*=bf16")]).then(de.Rule.parse("*norm*=float32"))
        >>> str(recipe)
        '*=bfloat16, *norm*=float32'
    """

    rules: tuple[Rule, ...] = ()
    """The rules, first to last. The last rule that selects a tensor decides the tensor's dtype."""

    @classmethod
    def of(cls, rules: Iterable[Rule]) -> Recipe:
        return cls(tuple(rules))

    def then(self, *rules: Rule) -> Recipe:
        """Return this recipe with `rules` added at the end. Earlier rules with the same patterns have no effect and are removed."""
        patterns = {rule.pattern for rule in rules}
        return Recipe((*(earlier for earlier in self.rules if earlier.pattern not in patterns), *rules))

    def without(self, indices: Iterable[int]) -> Recipe:
        """Return this recipe without the rules at these indices."""
        dropped = set(indices)
        return Recipe(tuple(rule for index, rule in enumerate(self.rules) if index not in dropped))

    def __len__(self) -> int:
        return len(self.rules)

    def __str__(self) -> str:
        return ", ".join(map(str, self.rules)) or "as stored"


class RecipeHistory:
    """The recipes of a session, with unlimited undo and redo."""

    def __init__(self, recipe: Recipe = Recipe()) -> None:
        self._recipes = [recipe]
        self._at = 0

    @classmethod
    def of(cls, recipes: Iterable[Recipe], at: int) -> RecipeHistory:
        """Return a history restored from all its recipes in order. The recipe at index `at` becomes the current one."""
        history = cls()
        history._recipes, history._at = list(recipes), at
        return history

    @property
    def kept(self) -> tuple[tuple[Recipe, ...], int]:
        """All recipes in order, and the index of the current one. The method `of` takes both as its arguments."""
        return tuple(self._recipes), self._at

    @property
    def recipe(self) -> Recipe:
        """The current recipe."""
        return self._recipes[self._at]

    def push(self, recipe: Recipe) -> bool:
        """Make `recipe` the current one and discard undone recipes. Returns False if it is already the current one."""
        if recipe == self.recipe:
            return False
        self._recipes[self._at + 1 :] = [recipe]
        self._at += 1
        return True

    def undo(self) -> bool:
        """Go back to the previous recipe. Returns False if there is nothing to undo."""
        if self._at == 0:
            return False
        self._at -= 1
        return True

    def redo(self) -> bool:
        """Go forward to the most recently undone recipe. Returns False if there is nothing to redo."""
        if self._at + 1 == len(self._recipes):
            return False
        self._at += 1
        return True
