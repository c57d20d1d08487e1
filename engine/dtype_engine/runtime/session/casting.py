"""Applies recipes to a model in memory, with undo and redo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import UserError
from dtype_engine.recipe import History, Plan, Recipe, Rule, explain_no_match, make_plan
from dtype_engine.runtime.model.live import LiveModel

OnProgress = Callable[[int, int], None]


class Casting:
    """Casts a model's weights in place by recipes, and keeps the history of recipes for undo and redo."""

    def __init__(self, model: LiveModel) -> None:
        self._model = model
        self._history = History(Recipe())
        self.plan = make_plan(model.tree, Recipe())
        """The dtype of every tensor under the current recipe."""

    def use(self, recipe: Recipe, on_progress: OnProgress | None = None, cancelled: IsCancelled = never) -> None:
        """Apply a recipe and cast the model, without adding a step that `undo` can revert.

        on_progress: called with the numbers of cast weights and of those to cast. Raises Cancelled; TooSlow, before anything is
        changed, if a pattern takes too long to match; and UserError, after restoring the previous casts, if the device lacks a
        dtype or memory.
        """
        before, plan = self.plan, self._planned(recipe)
        self.plan = plan
        try:
            self._model.apply(plan.dtypes, on_progress, cancelled, plan.caches)
        except UserError:
            self.plan = before
            self._model.apply(before.dtypes, caches=before.caches)
            raise

    def push(self, recipe: Recipe, on_progress: OnProgress | None = None, cancelled: IsCancelled = never) -> None:
        """Apply a recipe and cast the model, as a step that `undo` can revert. Raises what `use` raises."""
        self._planned(recipe)
        pushed = self._history.push(recipe)
        try:
            self.use(recipe, on_progress, cancelled)
        except UserError:
            if pushed:
                self._history.undo()
            raise

    def add(self, rule: Rule) -> None:
        """Add a rule to the current recipe and cast the model, as a step that `undo` can revert. Raises what `use` raises, and
        UserError if the rule matches nothing.
        """
        recipe = self.plan.recipe.then(rule)
        plan = self._planned(recipe)
        if not plan.selections[-1]:
            raise UserError(explain_no_match(self._model.tree, rule.pattern, plan.selections[-1], rule.dtype))
        self.push(recipe)

    def undo(self) -> bool:
        """Apply the previous recipe. Returns False if there is none."""
        moved = self._history.undo()
        self.use(self._history.current)
        return moved

    def redo(self) -> bool:
        """Apply the recipe that `undo` reverted most recently. Returns False if there is none."""
        moved = self._history.redo()
        self.use(self._history.current)
        return moved

    def _planned(self, recipe: Recipe) -> Plan:
        plan = make_plan(self._model.tree, recipe)
        plan.refuse_too_slow()
        return plan

    @contextmanager
    def putting_back(self) -> Iterator[None]:
        """Cast the model by the current recipe again after the `with` block, which may have cast it differently."""
        try:
            yield
        finally:
            self._model.apply(self.plan.dtypes, caches=self.plan.caches)
