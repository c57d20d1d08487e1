"""The last step of a search: measures the drift of a few recipes near a limit on bytes or predicted drift, and chooses the best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dtype_engine.core.errors import OutOfReach
from dtype_engine.evaluation.work import Over, drifts
from dtype_engine.recipe import make_plan
from dtype_engine.recipe.minimize import minimize
from dtype_engine.results.drift import DriftReport
from dtype_engine.results.scan import Candidate, SearchReport
from dtype_engine.results.thresholds import Limit, verdicts
from dtype_engine.search.pareto import Constraints, Solution
from dtype_engine.search.sensitivity import scalar_drift
from dtype_engine.search.solve import around, spread

if TYPE_CHECKING:
    from dtype_engine.runtime.session.session import Session


def candidates(
    session: Session, budget: int | None, max_drift: float | None, constraints: Constraints, count: int
) -> tuple[Solution, ...]:
    """Return up to `count` recipes to measure, as solutions of a search. With a limit on bytes (`budget`) or on predicted drift
    (`max_drift`), the first is the best within it, and the others are near it in bytes. Without a limit, they are spread over the
    Pareto front.

    constraints: what the user requires of a recipe. Raises UserError, and OutOfReach if no recipe meets the limit.
    """
    if budget is None and max_drift is None:
        return spread(session.front(constraints), count)
    return around(session.front(constraints), budget, max_drift, count)


def best(
    session: Session,
    found: Sequence[Solution],
    limit: tuple[int | None, float | None],
    metrics: tuple[Limit, ...],
    constraints: Constraints,
    over: Over | None = None,
    on_measured: Callable[[int], None] = lambda done: None,
) -> SearchReport:
    """Measure the drift of the solutions `found` on the session's inputs, cast the model to the best one, and return a report.

    limit: (maximum number of bytes or None, maximum drift or None). metrics: limits on the user's metrics. Of the solutions that
    meet all limits, the best one has the least drift if the bytes are limited; otherwise it is the smallest. constraints: the
    search's constraints on recipes, for the Pareto front in the report. over: the workers that measure, or None for this process.
    `on_measured(done)` is called after each measurement with the number of measured solutions. Raises OutOfReach if no solution
    meets the limits, and the errors of `Session.drift`.
    """
    recipes = [minimize(session.tree, solution.dtypes) for solution in found]
    wanted = [(recipe, session.settings) for recipe in recipes]
    measured: dict[int, float] = {}
    reports: dict[int, DriftReport] = {}
    budget, max_drift = limit
    for done, (index, report) in enumerate(drifts(session, wanted, over), 1):
        measured[index], reports[index] = scalar_drift(report.output), report
        on_measured(done)
    within = [index for index in measured if max_drift is None or measured[index] <= max_drift]
    if within and metrics:
        reached = {index: verdicts(metrics, reports[index].output, reports[index].metrics) for index in within}
        within = [index for index in within if all(verdict.passed for verdict in reached[index])]
        if not within:
            largest = max(reached, key=lambda index: found[index].bytes)
            missed = next(verdict for verdict in reached[largest] if not verdict.passed)
            raise OutOfReach(f"none of the {len(found)} recipes measured meets the limits: the largest has {missed}")
    if not within:
        least = min(measured.values())
        raise OutOfReach(
            f"none of the {len(found)} recipes measured drifts by {max_drift:g} or less: the best by {least:.3g}"
        )
    index = min(
        within,
        key=lambda at: (measured[at], found[at].bytes) if budget is not None else (found[at].bytes, measured[at]),
    )
    session.apply(recipes[index])
    front = session.front(constraints)
    context = constraints.context
    assert session.scanned is not None
    return SearchReport(
        model=session.model.title,
        unit=session.scanned.unit,
        rules=tuple(map(str, recipes[index].rules)),
        stored_bytes=session.tree.stored_bytes,
        planned_bytes=found[index].bytes,
        predicted=found[index].score,
        front=tuple(front.points),
        measured=measured[index],
        notices=session.model.notices,
        lost=session.lost_values(plan=make_plan(session.tree, recipes[index])),
        candidates=tuple(
            Candidate(solution.bytes, solution.score, measured[at], reports[at].metrics)
            for at, solution in enumerate(found)
        ),
        held_out=session.inputs.description if session.inputs is not None else None,
        metrics=reports[index].metrics,
        coverage=session.model.coverage,
        context=context,
        cache_bytes=0 if context is None else found[index].bytes - session.plan.planned_bytes,
        formats=front.formats,
    )
