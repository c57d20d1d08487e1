"""Finds the best solution of a search under one limit: on the bytes of the model, or on its predicted drift."""

from __future__ import annotations

from dtype_engine.core.errors import OutOfReach, UserError
from dtype_engine.core.hints import hint
from dtype_engine.search.families import OWN
from dtype_engine.search.pareto import ParetoFront, Solution


def solve(front: ParetoFront, budget: int | None = None, max_drift: float | None = None) -> Solution:
    """Return the solution with the lowest predicted drift in `budget` bytes, or the smallest one whose predicted drift is at most
    `max_drift`. Raises UserError unless exactly one limit is given, and OutOfReach if no solution meets it.
    """
    if (budget is None) == (max_drift is None):
        raise UserError("a search needs either a budget in bytes or the largest drift that is allowed")
    nothing, wider = "nothing", ""
    if front.formats != OWN:
        nothing, wider = f"nothing that {front.formats} loads", f"; {hint('formats')}"
    if budget is not None:
        within = front.best_within(budget)
        if within is None:
            smallest = front.points[0].bytes
            raise OutOfReach(f"{nothing} fits in {budget:,} bytes: the smallest is {smallest:,} bytes{wider}")
        return within
    assert max_drift is not None
    reaching = front.smallest_reaching(max_drift)
    if reaching is None:
        best = front.points[-1].predicted
        raise OutOfReach(f"{nothing} drifts by {max_drift:g} or less: the lowest predicted drift is {best:.3g}")
    return reaching


def spread(front: ParetoFront, count: int) -> tuple[Solution, ...]:
    """Return up to `count` solutions of the front: the smallest, the largest, and others at even steps of the front's points."""
    steps = [round(step * (len(front.points) - 1) / max(1, count - 1)) for step in range(count)]
    return tuple(front.solution_at(index) for index in dict.fromkeys(steps))


def around(front: ParetoFront, budget: int | None, max_drift: float | None, count: int) -> tuple[Solution, ...]:
    """Return up to `count` solutions: the best one under a limit, which `solve` returns, then points of the front that are near the
    best one in bytes. With a limit on bytes, these points need no more bytes than the best one. With a limit on drift, they may
    need more, because the drift is only predicted and may be too high. Raises what `solve` raises.
    """
    first, sizes = solve(front, budget, max_drift), [point.bytes for point in front.points]
    if budget is not None:
        near = [index for index in reversed(range(len(sizes))) if sizes[index] <= first.bytes]
    else:
        near = sorted(range(len(sizes)), key=lambda index: abs(sizes[index] - first.bytes))
    others = [solution for solution in map(front.solution_at, near[:count]) if solution.dtypes != first.dtypes]
    return first, *others[: count - 1]
