"""A live model under a recipe: what a session can do without a forward pass."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, TypeVar

import torch

from dtype_engine.checkpoint import unchanged
from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import UserError
from dtype_engine.core.tree import Tree
from dtype_engine.recipe import Plan, Recipe, RecipeHistory, Rule, explain_no_match, make_plan
from dtype_engine.results.losses import ValueLoss
from dtype_engine.results.memory import MemoryStats
from dtype_engine.results.scan import Prediction, ScanReport
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.session.process_memory import process_memory
from dtype_engine.search.pareto import Constraints, ParetoFront, make_items
from dtype_engine.search.sensitivity import predict

OnProgress = Callable[[int, int], None]
P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound="CastModel")


def reading_weights(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """A method that reads weights: it raises UserError where their files are not, or no longer, those that were opened."""

    @functools.wraps(method)
    def reads(self: S, /, *arguments: P.args, **named: P.kwargs) -> T:
        with unchanged(self.model.identities):
            return method(self, *arguments, **named)

    return reads


class CastModel:
    """A live model and the recipe in force, which can be undone. It needs no inputs, and no forward pass."""

    def __init__(self, model: LiveModel) -> None:
        self.model = model
        self._history = RecipeHistory()
        self._plan = make_plan(model.tree, Recipe())
        self.scanned: ScanReport | None = None

    @contextmanager
    def putting_back(self) -> Iterator[None]:
        """Casts made meanwhile are undone: the recipe in force is cast again at the end.

        Example:
            >>> name = next(iter(session.model.weights))
            >>> with session.putting_back():
            ...     session.model.apply(session.plan.dtypes | {name: "bfloat16"})
            >>> session.model.weights[name].dtype
            'float32'
        """
        try:
            yield
        finally:
            self.model.apply(self._plan.dtypes)

    @property
    def kept_outputs(self) -> tuple[int, int] | None:
        """Bytes of outputs kept for the next measurement, and the most that may be; None where nothing is measured."""
        return None

    @property
    def tree(self) -> Tree:
        """Modules and tensors, with classes, ties and buffers.

        Example:
            >>> session.tree.stored_bytes
            2831232
        """
        return self.model.tree

    @property
    def recipe(self) -> Recipe:
        """The recipe in force.

        Example:
            >>> session.recipe
            Recipe(rules=())
        """
        return self._plan.recipe

    @property
    def plan(self) -> Plan:
        """The dtype of every tensor under the recipe in force.

        Example:
            >>> set(session.plan.dtypes.values())
            {'float32'}
        """
        return self._plan

    @reading_weights
    def cast(self, pattern: str, dtype: str) -> Plan:
        """Add a rule and cast what it takes, in place.

        Args:
            pattern: Names of modules or tensors, with wildcards; or `type:Class`, or `re:` and a regular expression.
            dtype: What to cast to: a name or short name, or "stored".

        Returns:
            The plan of all rules, the new one last.

        Raises:
            PatternError: The pattern can't be read, or takes too long to match.
            UserError: The dtype is unknown, or the pattern takes nothing.

        Example:
            >>> plan = session.cast("*.mlp", "bfloat16")
            >>> plan.planned_bytes < plan.stored_bytes
            True
        """
        rule = Rule.make(pattern, dtype)
        recipe = self.recipe.then(rule)
        plan = make_plan(self.tree, recipe)
        plan.refuse_too_slow()
        if not plan.selections[-1]:
            raise UserError(explain_no_match(self.tree, rule.pattern, plan.selections[-1]))
        self.apply(recipe)
        return self._plan

    @reading_weights
    def apply(self, recipe: Recipe, on_progress: OnProgress | None = None, cancelled: IsCancelled = never) -> None:
        """Put a whole recipe in force, as a step that `undo` takes back.

        Rules that take nothing have no effect; `plan.unmatched` names them.

        Args:
            recipe: The rules; the last that takes a tensor decides.
            on_progress: Called with the tensors cast and how many are to be.
            cancelled: Asked between tensors.

        Raises:
            TooSlow: A pattern takes too long to match; nothing is changed.
            Cancelled: `cancelled()` was true; the next recipe completes the cast.

        Example:
            >>> session.apply(de.Recipe.of([de.Rule.parse("*=float16"), de.Rule.parse("*norm*=float32")]))
            >>> len(session.recipe)
            2
        """
        make_plan(self.tree, recipe).refuse_too_slow()
        self._history.push(recipe)
        self.use_recipe(recipe, on_progress, cancelled)

    @reading_weights
    def use_recipe(self, recipe: Recipe, on_progress: OnProgress | None = None, cancelled: IsCancelled = never) -> None:
        """Put a whole recipe in force without a step to undo, for callers with a history of their own; else as `apply`.

        Args:
            recipe: The rules; the last that takes a tensor decides.
            on_progress: Called with the tensors cast and how many are to be.
            cancelled: Asked between tensors.

        Raises:
            TooSlow: A pattern takes too long to match; nothing is changed.
            Cancelled: `cancelled()` was true; the next recipe completes the cast.

        Example:
            >>> session.use_recipe(de.Recipe.of([de.Rule.parse("*=bf16")]))
            >>> str(session.recipe)
            '*=bfloat16'
        """
        plan = make_plan(self.tree, recipe)
        plan.refuse_too_slow()
        self._plan = plan
        self.model.apply(plan.dtypes, on_progress, cancelled)

    @reading_weights
    def undo(self) -> bool:
        """Go back to the recipe before.

        Returns:
            False when there is nothing left to undo.

        Example:
            >>> _ = session.cast("*", "float16")
            >>> session.undo(), session.redo()
            (True, True)
        """
        moved = self._history.undo()
        self.use_recipe(self._history.recipe)
        return moved

    @reading_weights
    def redo(self) -> bool:
        """Go forward again to what `undo` took back.

        Returns:
            False when nothing was undone.

        Example:
            >>> session.redo()
            False
        """
        moved = self._history.redo()
        self.use_recipe(self._history.recipe)
        return moved

    @reading_weights
    def lost_values(self, cancelled: IsCancelled = never, plan: Plan | None = None) -> tuple[ValueLoss, ...]:
        """The weights of which a cast makes values infinite or zero; rounding is no loss.

        Args:
            cancelled: Asked between tensors.
            plan: Count for this plan; by default for the recipe in force.

        Returns:
            One entry a weight that loses values, with their numbers.

        Raises:
            Cancelled: `cancelled()` was true.

        Example:
            >>> _ = session.cast("*", "bfloat16")
            >>> session.lost_values()
            ()
        """
        return self.model.lost_values(None if plan is None else plan.dtypes, cancelled)

    def predict(self, recipe: Recipe | None = None) -> Prediction:
        """Predict the drift of a recipe by the last scan: the sum of its weights' scores.

        Args:
            recipe: By default the one in force.

        Returns:
            The drift in the scan's unit. Raises UserError when nothing was scanned, or not in a dtype of the recipe.

        Example:
            >>> _ = session.scan(["bfloat16"], draws=1)
            >>> session.predict(de.Recipe.of([de.Rule.parse("*=bf16")])).value > 0
            True
        """
        if self.scanned is None:
            raise UserError("nothing was scanned yet, so no drift can be predicted")
        plan = self.plan if recipe is None else make_plan(self.tree, recipe)
        return predict(self.tree, plan, self.scanned, self.scanned.scores())

    def front(self, constraints: Constraints | None = None) -> ParetoFront:
        """The Pareto front of bytes against predicted drift, by the last scan.

        Args:
            constraints: Which weights stay as stored, share a dtype, or may have some dtypes only.

        Returns:
            The points, the largest model first. Raises UserError when nothing was scanned.

        Example:
            >>> _ = session.scan(["bfloat16"], draws=1)
            >>> len(session.front().points) > 1
            True
        """
        if self.scanned is None:
            raise UserError("nothing was scanned yet, so there is nothing to search in")
        return ParetoFront(make_items(self.tree, self.scanned.scores(), constraints or Constraints()))

    def memory(self) -> MemoryStats:
        """Bytes of the weights and of the process now.

        Returns:
            `peak_rss_bytes` counts since the last measurement began; a figure that the system does not have is None.

        Example:
            >>> session.memory().stored_bytes
            2831232
        """
        process = process_memory(self.model.files)
        kept, budget = self.kept_outputs or (None, None)
        stats = MemoryStats(
            stored_bytes=self._plan.stored_bytes,
            planned_bytes=self._plan.planned_bytes,
            resident_bytes=self.model.resident_bytes,
            resident_by_device=tuple(self.model.resident_by_device().items()),
            rss_bytes=process.rss,
            anonymous_bytes=process.anonymous,
            mapped_bytes=process.mapped,
            peak_rss_bytes=process.peak_rss,
            kept_bytes=kept,
            kept_budget_bytes=budget,
        )
        device = self.model.device
        if device.type != "cuda":
            return stats
        return dataclasses.replace(
            stats,
            device_allocated_bytes=torch.cuda.memory_allocated(device),
            device_reserved_bytes=torch.cuda.memory_reserved(device),
            device_peak_bytes=torch.cuda.max_memory_allocated(device),
        )
