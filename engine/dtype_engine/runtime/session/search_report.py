"""Searches the best recipe with the scores of a session's last scan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dtype_engine.core.errors import OutOfReach
from dtype_engine.core.kv_cache import STATES
from dtype_engine.core.tree import Tree
from dtype_engine.core.units import plural
from dtype_engine.recipe import Plan, Recipe, Rule
from dtype_engine.results.drift import DriftReport
from dtype_engine.results.losses import ValueLoss
from dtype_engine.results.scan import SearchReport
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.search.advice import format_that_fits
from dtype_engine.search.families import Loadable
from dtype_engine.search.pareto import Constraints, ParetoFront, Solution
from dtype_engine.search.sensitivity import scalar_drift


class FoundRecipe(SearchReport):
    """The report of a search, with the recipe that it found."""

    __slots__ = ()

    @property
    def recipe(self) -> Recipe:
        """The recipe, as `Session.apply` takes it."""
        return Recipe.of(map(Rule.parse, self.rules))


def solved(
    front: ParetoFront,
    budget: int | None,
    max_drift: float | None,
    tree: Tree,
    scores: Mapping[tuple[str, str], float],
    constraints: Constraints | None,
) -> Solution:
    """Return the solution of a front. Raises OutOfReach, which names a format that was not scanned and would fit in the budget."""
    try:
        return front.solve(budget, max_drift)
    except OutOfReach as error:
        asked = replace(constraints or Constraints(), formats=front.formats, by=front.by)
        fits = format_that_fits(tree, scores, asked, budget) if budget is not None else None
        words = f"; weights in {fits} would fit, which were not scanned" if fits is not None else ""
        raise OutOfReach(f"{error}{words}") from None


def search_report(
    model: LiveModel,
    unit: str,
    front: ParetoFront,
    solution: Solution,
    plan: Plan,
    drift: DriftReport | None,
    context: int | None,
    lost: tuple[ValueLoss, ...],
) -> FoundRecipe:
    """Return the report of a search on `front` that found `solution`.

    unit: the unit of predicted and measured drifts. plan: the plan of the solution's recipe. drift, lost: the measured drift (None
    if it was not measured) and the lost values under this plan. context: the number of tokens for which the solution's bytes
    include KV caches, or None if they include no caches.
    """
    of_weights = Loadable(model.tree, front.formats, ()).nbytes(plan.dtypes)
    return FoundRecipe(
        model=model.title,
        unit=unit,
        rules=tuple(map(str, plan.recipe.rules)),
        stored_bytes=model.tree.stored_bytes,
        planned_bytes=solution.bytes,
        predicted=solution.score,
        front=tuple(front.points),
        measured=None if drift is None else scalar_drift(drift.output),
        metrics=() if drift is None else drift.metrics,
        notices=(*model.notices, *_unscored(plan)),
        lost=lost,
        coverage=model.coverage,
        context=context,
        cache_bytes=0 if context is None else solution.bytes - of_weights,
        formats=front.formats,
        output=None if drift is None else drift.output,
        active_bytes=solution.active_bytes,
    )


def _unscored(plan: Plan) -> tuple[str, ...]:
    """Return a notice if a plan gives formats to recurrent states, which add nothing to its predicted drift."""
    states = sum(name.endswith(STATES) for name in plan.caches)
    if not states:
        return ()
    return (f"the prediction leaves out {plural(states, 'recurrent state')}, which a scan does not score",)
