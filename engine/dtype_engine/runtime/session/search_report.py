"""The report of a search."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.recipe import Plan
from dtype_engine.results.drift import DriftReport
from dtype_engine.results.scan import SearchReport
from dtype_engine.search.pareto import ParetoFront, Solution
from dtype_engine.search.sensitivity import scalar_drift

if TYPE_CHECKING:
    from dtype_engine.runtime.session.session import Session


def search_report(
    session: Session,
    front: ParetoFront,
    solution: Solution,
    plan: Plan,
    drift: DriftReport | None,
    context: int | None,
    cancelled: IsCancelled = never,
) -> SearchReport:
    """Return the report of a search on `front` that found `solution`.

    plan: the plan of the recipe that gives the dtypes of the solution. drift: a measurement of it, or None. context: the number of
    tokens in each sequence of the KV caches that the solution's bytes include, or None if they include none.
    """
    assert session.scanned is not None
    return SearchReport(
        model=session.model.title,
        unit=session.scanned.unit,
        rules=tuple(map(str, plan.recipe.rules)),
        stored_bytes=session.tree.stored_bytes,
        planned_bytes=solution.bytes,
        predicted=solution.score,
        front=tuple(front.points),
        measured=None if drift is None else scalar_drift(drift.output),
        metrics=() if drift is None else drift.metrics,
        notices=session.model.notices,
        lost=session.lost_values(cancelled, plan),
        coverage=session.model.coverage,
        context=context,
        cache_bytes=0 if context is None else solution.bytes - plan.planned_bytes,
        formats=front.formats,
    )
