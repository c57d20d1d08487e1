"""Searches the best recipe with the scores of a session's last scan."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dtype_engine.core.cancellation import IsCancelled
from dtype_engine.core.errors import OutOfReach
from dtype_engine.recipe import Plan, Recipe, Rule, make_plan
from dtype_engine.recipe.minimize import minimize
from dtype_engine.results.drift import DriftReport
from dtype_engine.results.losses import ValueLoss
from dtype_engine.results.scan import SearchReport
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.search.advice import format_that_fits
from dtype_engine.search.constraints import parse_bytes
from dtype_engine.search.pareto import Constraints, ParetoFront, Solution
from dtype_engine.search.sensitivity import scalar_drift

if TYPE_CHECKING:
    from dtype_engine.runtime.session.session import Session


class FoundRecipe(SearchReport):
    """The report of a search, with the recipe that it found."""

    __slots__ = ()

    @property
    def recipe(self) -> Recipe:
        """The recipe, as `Session.apply` takes it."""
        return Recipe.of(map(Rule.parse, self.rules))


def find(
    session: Session,
    budget: int | str | None,
    max_drift: float | None,
    constraints: Constraints | None,
    measure: bool,
    cancelled: IsCancelled,
) -> FoundRecipe:
    """Return what `Session.search` returns, and raise what it raises."""
    front = session.front(constraints)
    most = parse_bytes(budget, session.tree.stored_bytes) if isinstance(budget, str) else budget
    try:
        solution = front.solve(most, max_drift)
    except OutOfReach as error:
        raise OutOfReach(f"{error}{_fitting(session, constraints, most)}") from None
    recipe = minimize(session.tree, solution.dtypes)
    plan, context = make_plan(session.tree, recipe), None if constraints is None else constraints.context
    if measure:
        session.apply(recipe, cancelled=cancelled)
    report = session.drift(cancelled=cancelled) if measure else None
    lost = session.lost_values(cancelled, plan)
    return search_report(session.model, session.need_scan().unit, front, solution, plan, report, context, lost)


def _fitting(session: Session, constraints: Constraints | None, budget: int | None) -> str:
    """Return words that name a format that was not scanned and fits in a budget, or "" if there is none."""
    if budget is None:
        return ""
    asked = replace(constraints or Constraints(), formats=session.front(constraints).formats)
    fits = format_that_fits(session.tree, session.need_scan().scores(), asked, budget)
    return f"; weights in {fits} would fit, which were not scanned" if fits is not None else ""


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
        notices=model.notices,
        lost=lost,
        coverage=model.coverage,
        context=context,
        cache_bytes=0 if context is None else solution.bytes - plan.planned_bytes,
        formats=front.formats,
    )
