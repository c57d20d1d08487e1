"""The last step of a search: measures a few recipes near a limit on bytes or predicted drift, and chooses the best."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from dtype_engine.core.errors import OutOfReach
from dtype_engine.evaluation.work import Over, drifts
from dtype_engine.recipe import make_plan
from dtype_engine.recipe.minimize import minimize
from dtype_engine.results.drift import DriftReport
from dtype_engine.results.scan import Candidate, SearchReport
from dtype_engine.results.thresholds import Limit, meets, told_apart, verdicts
from dtype_engine.search.pareto import Constraints, Solution
from dtype_engine.search.sensitivity import scalar_drift

if TYPE_CHECKING:
    from dtype_engine.runtime.session.session import Session


def best(
    session: Session,
    found: Sequence[Solution],
    limit: tuple[int | None, float | None],
    metrics: tuple[Limit, ...],
    constraints: Constraints,
    over: Over | None = None,
    on_measured: Callable[[int], None] = lambda done: None,
) -> SearchReport:
    """Measure the drift of the solutions `found`, cast the model to the best one, and return a report.

    limit: (maximum number of bytes or None, maximum drift or None). Of the solutions that meet all limits, the best one has the
    least drift if the bytes are limited; otherwise it is the smallest. metrics: limits on the user's metrics. constraints: for
    the Pareto front in the report. over: the workers that measure, or None for this process. `on_measured(done)` is called
    after each measurement. Raises OutOfReach if no solution meets the limits, and the errors of `Session.drift`.
    """
    from dtype_engine.runtime.session.search_report import search_report

    recipes = [minimize(session.tree, solution.dtypes) for solution in found]
    reports: dict[int, DriftReport] = {}
    for done, (index, report) in enumerate(drifts(session, [(each, session.settings) for each in recipes], over), 1):
        reports[index] = report
        on_measured(done)
    measured = {index: scalar_drift(report.output) for index, report in reports.items()}
    budget, max_drift = limit
    within = [
        index for index, drift in measured.items()
        if max_drift is None or (reports[index].output.is_finite and meets(drift, max_drift, is_most=True))
    ]  # fmt: skip
    if within and metrics:
        within = _reaching(metrics, within, reports, found)
    if not within:
        assert max_drift is not None
        least, most = told_apart(min(measured.values()), max_drift, 4)
        raise OutOfReach(f"none of the {len(found)} recipes measured drifts by {most} or less: the best by {least}")
    front = session.front(constraints)
    sizes = list(map(front.size_of, found))
    index = min(within, key=lambda at: (measured[at], sizes[at]) if budget is not None else (sizes[at], measured[at]))
    session.apply(recipes[index])
    plan = make_plan(session.tree, recipes[index])
    lost, context = session.lost_values(plan=plan), constraints.context
    unit = session.need_scan().unit
    return dataclasses.replace(
        search_report(session.model, unit, front, found[index], plan, reports[index], context, lost),
        candidates=tuple(
            Candidate(solution.bytes, solution.score, measured[at], reports[at].metrics, reports[at].output)
            for at, solution in enumerate(found)
        ),
        held_out=session.inputs.description if session.inputs is not None else None,
    )


def _reaching(
    limits: tuple[Limit, ...], within: list[int], reports: Mapping[int, DriftReport], found: Sequence[Solution]
) -> list[int]:
    """Return those of the indexes `within` whose solutions in `found` meet the limits. reports: the measurements, by index. Raises
    OutOfReach if no solution meets them.
    """
    verdicts_of = {index: verdicts(limits, reports[index].output, reports[index].metrics) for index in within}
    reaching = [index for index in within if all(verdict.passed for verdict in verdicts_of[index])]
    if not reaching:
        largest = max(within, key=lambda index: found[index].bytes)
        missed = next(verdict for verdict in verdicts_of[largest] if not verdict.passed)
        raise OutOfReach(f"none of the {len(found)} recipes measured meets the limits: the largest has {missed}")
    return reaching
