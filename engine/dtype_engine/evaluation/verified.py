"""The last step of a search: measures the recipes predicted nearest to a limit on bytes or drift, and chooses the best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dtype_engine.core.errors import OutOfReach
from dtype_engine.evaluation.work import Over, drifts
from dtype_engine.recipe import make_plan
from dtype_engine.recipe.minimize import minimize
from dtype_engine.results.scan import Candidate, SearchReport
from dtype_engine.search.pareto import Constraints, Solution
from dtype_engine.search.sensitivity import scalar_drift
from dtype_engine.search.solve import around

if TYPE_CHECKING:
    from dtype_engine.runtime.session.session import Session


def candidates(
    session: Session, budget: int | None, max_drift: float | None, constraints: Constraints, count: int
) -> tuple[Solution, ...]:
    """Return the `count` recipes nearest to a limit, as solutions of a search. With a `budget` in bytes, they are nearest in size;
    with `max_drift`, in the drift that the last scan predicts.

    constraints: what the user requires of a recipe. Raises UserError, OutOfReach.
    """
    return around(session.front(constraints), budget, max_drift, count)


def best(
    session: Session,
    found: Sequence[Solution],
    max_drift: float | None,
    constraints: Constraints,
    over: Over | None = None,
    on_measured: Callable[[int], None] = lambda done: None,
) -> SearchReport:
    """Measure the drift of the solutions `found` on the session's inputs, cast the model to the best one, and return a report. If
    `max_drift` is None, the best solution is the one with the least drift. Otherwise, it is the smallest one whose drift does not
    exceed `max_drift`.

    constraints: the search's constraints on recipes, for the Pareto front in the report. over: the workers that measure, or None
    for this process. `on_measured(done)` is called after each measurement. Raises OutOfReach if all exceed `max_drift`, and the
    errors of `Session.drift`.
    """
    recipes = [minimize(session.tree, solution.dtypes) for solution in found]
    wanted = [(recipe, session.settings) for recipe in recipes]
    measured: dict[int, float] = {}
    for done, (index, report) in enumerate(drifts(session, wanted, over), 1):
        measured[index] = scalar_drift(report.output)
        on_measured(done)
    within = [index for index in measured if max_drift is None or measured[index] <= max_drift]
    if not within:
        least = min(measured.values())
        raise OutOfReach(
            f"none of the {len(found)} recipes measured drifts by {max_drift:g} or less: the best by {least:.3g}"
        )
    index = min(
        within, key=lambda at: (measured[at], found[at].bytes) if max_drift is None else (found[at].bytes, measured[at])
    )
    session.apply(recipes[index])
    assert session.scanned is not None
    return SearchReport(
        model=session.model.title,
        unit=session.scanned.unit,
        rules=tuple(map(str, recipes[index].rules)),
        stored_bytes=session.tree.stored_bytes,
        planned_bytes=found[index].bytes,
        predicted=found[index].score,
        front=tuple(session.front(constraints).points),
        measured=measured[index],
        notices=session.model.notices,
        lost=session.lost_values(plan=make_plan(session.tree, recipes[index])),
        candidates=tuple(Candidate(solution.bytes, solution.score, measured[at]) for at, solution in enumerate(found)),
        held_out=session.inputs.description if session.inputs is not None else None,
        coverage=session.model.coverage,
    )
