"""Rules and recipes. A rule is a pattern and a dtype. A recipe is an ordered list of rules; the last rule that matches wins."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.core.kv_cache import STATES
from dtype_engine.core.kv_formats import (
    KV_FORMATS,
    STOCHASTIC,
    format_of_caches,
    may_have,
    may_name_caches,
    names_caches,
    names_states_alone,
    parse_format,
    why_no_state,
)
from dtype_engine.core.text import Name
from dtype_engine.recipe.pattern import compile_pattern

_State = TypeVar("_State")
_TARGETS = frozenset((*dtypes.CASTABLE_DTYPES, *KV_FORMATS, dtypes.STORED))


@dataclass(frozen=True, slots=True)
class Rule:
    """Casts every tensor that `pattern` selects to `dtype`. Raises UserError for an unknown dtype.

    Example:
        >>> de.Rule.parse("*.mlp=bf16")
        Rule(pattern='*.mlp', dtype='bfloat16')
    """

    pattern: Name
    """Names of modules or tensors, with wildcards; or `type:` and a class; or `re:` and a regular expression."""
    dtype: str
    """A name in `dtypes.CASTABLE_DTYPES` or, for KV caches, in `KV_FORMATS`; or `dtypes.STORED`, with which tensors keep their
    stored dtypes. Another spelling, such as `bf16`, is replaced by the name.
    """

    def __post_init__(self) -> None:
        if self.dtype not in _TARGETS:  # another spelling, such as `bf16`
            object.__setattr__(self, "dtype", Rule.make(self.pattern, self.dtype).dtype)

    @classmethod
    def make(cls, pattern: str, dtype: object) -> Rule:
        """Return a rule. dtype: a name in any spelling, or a `torch.dtype`. Raises UserError if pattern or dtype is invalid, or if
        the tensors that the pattern names can't have the dtype.
        """
        compiled = compile_pattern(pattern)
        found = _target(compiled.text, str(dtype))
        if names_states_alone(compiled.text) and not any(may_have(part, found) for part in STATES):
            raise UserError(why_no_state(found))
        return cls(compiled.text, found)

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Parse a rule written as `PATTERN=DTYPE`. Raises UserError if the text is not such a rule."""
        pattern, equals, dtype = text.rpartition("=")
        if not equals or not pattern.strip() or not dtype.strip():
            raise UserError(f"can't read the cast {text!r}: write PATTERN=DTYPE, for example '*.mlp=bfloat16'")
        return cls.make(pattern, dtype)

    def __str__(self) -> str:
        return f"{self.pattern}={self.dtype}"


def _target(pattern: str, dtype: str) -> str:
    """Return the full name of a dtype or a format in a rule. Raises UserError."""
    if names_caches(pattern):
        return parse_format(dtype)
    if (only := format_of_caches(dtype)) is None:
        return dtypes.parse_target(dtype)
    if not may_name_caches(pattern):
        who, example = ("states of recurrences", "ssm_state") if only == STOCHASTIC else ("KV caches", "kv_cache")
        raise UserError(f"only {who} can be {only}: write a pattern that names them, for example '*.{example}={only}'")
    return only


@dataclass(frozen=True, slots=True)
class Recipe:
    """An ordered list of rules; the last rule that selects a tensor decides its dtype. A recipe is immutable and hashable, so that
    measurements can be stored by recipe.

    Example:
        >>> recipe = de.Recipe.of([de.Rule.parse("*=bf16")]).then(de.Rule.parse("*norm*=float32"))
        >>> str(recipe)
        '*=bfloat16, *norm*=float32'
    """

    rules: tuple[Rule, ...] = ()

    @classmethod
    def of(cls, rules: Iterable[Rule]) -> Recipe:
        return cls(tuple(rules))

    def then(self, *rules: Rule) -> Recipe:
        """Return this recipe with `rules` added at the end. Earlier rules with the same patterns have no effect and are removed."""
        patterns = {rule.pattern for rule in rules}
        return Recipe((*(earlier for earlier in self.rules if earlier.pattern not in patterns), *rules))

    def without(self, indices: Iterable[int]) -> Recipe:
        dropped = set(indices)
        return Recipe(tuple(rule for index, rule in enumerate(self.rules) if index not in dropped))

    def __len__(self) -> int:
        return len(self.rules)

    def __str__(self) -> str:
        return ", ".join(map(str, self.rules)) or "as stored"


class History(Generic[_State]):
    """The states that a session has had, such as its recipes, with unlimited undo and redo."""

    def __init__(self, first: _State) -> None:
        self._states = [first]
        self._at = 0

    @classmethod
    def of(cls, states: Iterable[_State], at: int) -> History[_State]:
        """Return a history restored from all of its states and the index of the current one, as `kept` returns them."""
        kept = list(states)
        history = cls(kept[0])
        history._states, history._at = kept, at
        return history

    @property
    def kept(self) -> tuple[tuple[_State, ...], int]:
        """All states in order, and the index of the current one."""
        return tuple(self._states), self._at

    @property
    def current(self) -> _State:
        return self._states[self._at]

    def push(self, state: _State) -> bool:
        """Make `state` the current state, and discard states that were undone. Returns False if it is the current state already."""
        if state == self.current:
            return False
        self._states[self._at + 1 :] = [state]
        self._at += 1
        return True

    def undo(self) -> bool:
        """Go back to the previous state. Returns False if there is none."""
        return self._move(-1)

    def redo(self) -> bool:
        """Go forward to the state that was undone last. Returns False if there is none."""
        return self._move(1)

    def _move(self, step: int) -> bool:
        is_there = 0 <= self._at + step < len(self._states)
        self._at += step * is_there
        return is_there
