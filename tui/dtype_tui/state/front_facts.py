"""What the window of the Pareto front says about a point and about the whole front. It is computed in a thread."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from dtype_engine.core import dtypes
from dtype_engine.core.units import human_bytes
from dtype_engine.recipe import Plan, Recipe, make_plan
from dtype_engine.recipe.loading import LOADERS, OWN, Loading
from dtype_engine.recipe.minimize import minimize
from dtype_engine.search.advice import far_better, format_that_fits, main_change, most_saved, other_fronts
from dtype_engine.search.pareto import Constraints, ParetoFront, Solution
from dtype_tui.state.experiment import Experiment
from dtype_tui.state.loading import loadings


class PointFacts(msgspec.Struct, frozen=True):
    """The recipe of a point of the front, and what is said about it."""

    solution: Solution
    recipe: Recipe
    """The shortest recipe for the point."""
    loadings: tuple[Loading, ...]
    notes: tuple[str, ...]


class Fronts(msgspec.Struct):
    """A Pareto front, and those for other programs under the same constraints, which are computed when first used."""

    experiment: Experiment
    plan: Plan
    """The plan of the current recipe, with which points are compared."""
    front: ParetoFront
    constraints: Constraints
    budget: int | None
    current_bytes: int
    """The planned bytes of the current recipe, with KV caches if the front counts them."""
    _others: dict[str, ParetoFront] | None = None
    _fits: tuple[str | None] | None = None

    def facts(self, solution: Solution) -> PointFacts:
        tree = self.experiment.tree
        recipe = minimize(tree, solution.dtypes)
        found = loadings(self.experiment, make_plan(tree, recipe))
        return PointFacts(solution, recipe, found, tuple(self._notes(solution)))

    def _notes(self, solution: Solution) -> Iterator[str]:
        if (fits := self._format_that_fits()) is not None:
            yield f"{dtypes.short_name(fits)} weights would fit in {human_bytes(self.budget or 0)}: scan them, too"
        if (gain := self._gain(solution)) is not None:
            name, saved = gain
            who = f"only {LOADERS[name]} reads" if name == OWN else f"{LOADERS[name]} reads"
            yield f"{human_bytes(saved)} less at no more drift if {who} it (f)"
        if (better := self._better_than_now()) is not None:
            yield better

    def _gain(self, solution: Solution) -> tuple[str, int] | None:
        if self.experiment.model.loader == OWN:
            return None
        if self._others is None:
            self._others = other_fronts(self.experiment.tree, self.experiment.scan.scores, self.constraints)
        return most_saved(self._others, self.front.size_of(solution), solution.score)

    def _format_that_fits(self) -> str | None:
        if self.budget is None or self.front.size_of(self.front.points[0]) <= self.budget:
            return None
        if self._fits is None:
            experiment = self.experiment
            found = format_that_fits(experiment.tree, experiment.scan.scores, self.constraints, self.budget)
            self._fits = (found,)
        return self._fits[0]

    def _better_than_now(self) -> str | None:
        """Return a sentence if a point of the front is no larger than the current recipe and drifts far less."""
        experiment = self.experiment
        now = experiment.scan.prediction(experiment.tree, self.plan)
        if now is None or now.value <= 0:
            return None
        at = far_better(self.front, self.current_bytes, now.value)
        if at is None:
            return None
        change = main_change(experiment.tree, self.plan.dtypes, self.front.solution_at(at).dtypes)
        words = f", mainly by {' → '.join(map(dtypes.short_name, change))}" if change is not None else ""
        predicted = self.front.points[at].predicted
        less = f"{now.value / predicted:.0f} x less" if predicted > 0 else "not at all"
        return f"point {at + 1} is no larger than the current recipe and drifts {less}{words}"
