"""The window that plots the Pareto front of bytes against predicted drift, and the drift of measured recipes."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.timer import Timer
from textual.widgets import Static

from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.core.text import printable
from dtype_engine.core.units import human_bytes
from dtype_engine.recipe import Recipe, make_plan
from dtype_engine.recipe.loading import LOADERS
from dtype_engine.recipe.minimize import minimize
from dtype_engine.recipe.serving_memory import cache_bytes
from dtype_engine.results.drift import SQUARED
from dtype_engine.search.constraints import SearchConstraints
from dtype_engine.search.pareto import ParetoFront, Solution, written_dtype
from dtype_tui.config.bindings import FRONT_KEYS
from dtype_tui.rendering.canvas import Series, axes_around, plot
from dtype_tui.rendering.cells import truncate
from dtype_tui.rendering.palette import ACCENT, colour
from dtype_tui.screens.modal import ModalScreen
from dtype_tui.state.controller import Controller
from dtype_tui.state.front_facts import Fronts, PointFacts
from dtype_tui.state.loading import loading_lines, loading_reasons
from dtype_tui.state.scan import Point, figure
from dtype_tui.widgets.line_input import LineInput

_RESTS_S = 0.05
"""Seconds that the cursor must rest on a point before the app computes the point's rules."""
_MOST_ZOOM = 64
_AROUND = 2
"""Number of points on either side of the cursor that are measured together with the point under it."""
_COMPUTING = "the rules of this point are still computed: c compares when they are known"
_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


class OptimiseScreen(ModalScreen[None]):
    """Shows the Pareto front, along which the cursor moves. Enter applies and measures the recipe under the cursor."""

    DEFAULT_CSS = """
    OptimiseScreen { background: $background; }
    OptimiseScreen > #front-title, OptimiseScreen > #front-keys, OptimiseScreen > #front-legend { height: 1; }
    OptimiseScreen > #front-title { background: $surface; }
    OptimiseScreen > #front-plot { height: 3fr; min-height: 6; }
    OptimiseScreen > VerticalScroll { height: 2fr; min-height: 4; padding: 0 1; scrollbar-size-vertical: 1; }
    OptimiseScreen > VerticalScroll > Static { height: auto; }
    OptimiseScreen > Input { display: none; margin: 0 1; }
    OptimiseScreen > Input.open { display: block; }
    """

    AUTO_FOCUS = ""  # the line to type limits in would take the arrows
    BINDINGS: ClassVar[list[BindingType]] = FRONT_KEYS

    def __init__(self, controller: Controller) -> None:
        super().__init__()
        self._controller = controller
        self.experiment = controller.experiment
        self.view = self.experiment.scan
        self.front: ParetoFront | None = None
        self.index = 0
        self.within: Solution | None = None
        """The best solution for the user's budget, if the cursor is on it. Its size may lie between two drawn points."""
        self._fronts: Fronts | None = None
        """The front, with those of other programs."""
        self._facts: PointFacts | None = None
        """What was computed last about a point."""
        self._facts_by: Fronts | None = None
        """What `_facts` was computed by."""
        self._measured_caches: dict[Recipe, int] = {}
        self._active_bytes: dict[Recipe, int] = {}
        self._timer: Timer | None = None
        self._seen = -1
        self._applies = False
        """Whether Enter was pressed before the rules of the point were known. They are then applied, unless the user walks on."""
        self._warning = ""
        """The last warning of this window."""
        self.zoom = 1
        """The width of the whole front divided by the width of its visible part."""

    def compose(self) -> ComposeResult:
        yield Static(id="front-title", markup=False)
        yield Static(id="front-plot", markup=False)
        yield Static(id="front-legend", markup=False)
        with VerticalScroll(can_focus=False):
            yield Static(id="front-point", markup=False)
        placeholder = "8MiB or 45% | keep PATTERN | alike PATTERN | only DTYPES | formats NAME | clear"
        yield LineInput("front-limit", self._enter, placeholder=placeholder)
        yield Static(id="front-keys", markup=False)

    def on_mount(self) -> None:
        self._make(self.view.limits)

    def on_resize(self) -> None:
        self.call_after_refresh(self._draw)

    def show_figures(self) -> None:
        compared = self._fronts.plan if self._fronts is not None else None
        if self._seen != self.view.version or compared is not self.experiment.plan:
            self._make(self.view.limits)

    def _make(self, limits: SearchConstraints) -> bool:
        """Compute the front under the user's requirements. Returns False if no plan meets them. If the cursor follows a budget, it
        moves to the best plan for it. Otherwise, it moves to the largest plan that has at most the bytes of its previous plan.
        """
        self._seen = self.view.version
        before, self.view.limits = self.view.limits, limits
        try:
            front = self.view.front(self.experiment.tree, self.experiment.tokens, self.experiment.served.batch)
        except UserError as error:
            self.view.limits = before
            self._warn(str(error))
            return False
        same = self.front is not None and self.front.by == front.by
        at = front.size_of(self.front.points[self.index]) if self.front is not None and same else None
        moved = self.front is None or limits != before
        self.front, self._applies = front, self._applies and not moved
        constraints = self.view.constraints(self.experiment.tokens, self.experiment.served.batch)
        now = self._size_of(self.experiment.recipe, self.experiment.plan.planned_bytes)
        self._fronts = Fronts(self.experiment, self.experiment.plan, front, constraints, limits.budget, now)
        sizes = list(map(front.size_of, front.points))
        middle = self._size_of(Recipe(), self.experiment.tree.stored_bytes) // 2
        self.index = max(0, bisect.bisect_right(sizes, at if at is not None else middle) - 1)
        if moved or self.within is not None:
            self.within = front.best_within(limits.budget) if limits.budget is not None else None
            if self.within is not None:
                self.index = max(0, bisect.bisect_right(sizes, front.size_of(self.within)) - 1)
        self._draw()
        return True

    def _cache_bytes(self, formats: Mapping[str, str]) -> int:
        """Return the bytes of the KV caches in these formats at the current context, or 0 if the scan has no scores of caches."""
        if not self.view.has_caches:
            return 0
        tree, experiment = self.experiment.tree, self.experiment
        given = {name: form for name, form in formats.items() if form != dtypes.STORED}
        return sum(cache_bytes(tree, given, written_dtype(tree), experiment.tokens, experiment.served.batch).values())

    def _measured_bytes(self, recipe: Recipe, weights: int) -> int:
        """Return the bytes of a measured recipe: `weights` and, if the front includes them, KV caches."""
        if recipe not in self._measured_caches:
            caches = make_plan(self.experiment.tree, recipe).caches if self.view.has_caches else {}
            self._measured_caches[recipe] = self._cache_bytes(caches)
        return weights + self._measured_caches[recipe]

    def _size_of(self, recipe: Recipe, weights: int) -> int:
        """Return the size of a recipe as the front counts it. weights: the planned bytes of the recipe."""
        if self.front is None or self.front.by == "bytes":
            return self._measured_bytes(recipe, weights)
        if recipe not in self._active_bytes:
            tree = self.experiment.tree
            self._active_bytes[recipe] = tree.active_bytes(make_plan(tree, recipe).dtypes) or 0
        return self._active_bytes[recipe]

    @property
    def solution(self) -> Solution | None:
        return self.within or (self.front.solution_at(self.index) if self.front is not None else None)

    @property
    def recipe(self) -> Recipe | None:
        """The shortest recipe for the plan under the cursor, or None until it is computed."""
        return self.facts.recipe if self.facts is not None else None

    @property
    def facts(self) -> PointFacts | None:
        """What is known about the plan under the cursor, or None until it is computed."""
        return self._facts if self._facts is not None and self._facts.solution == self.solution else None

    def _find_rules(self) -> None:
        """Compute the recipe under the cursor when the cursor rests. A thread does it, because it takes long for a large model."""
        if self._timer is not None:
            self._timer.stop()
        solution, fronts = self.solution, self._fronts
        if solution is None or fronts is None or (self.facts is not None and self._facts_by is fronts):
            return

        def find() -> None:
            self.app.call_from_thread(self._facts_found, fronts, fronts.facts(solution))

        self._timer = self.set_timer(_RESTS_S, lambda: self.run_worker(find, thread=True, exclusive=True))

    def _facts_found(self, fronts: Fronts, facts: PointFacts) -> None:
        if self.is_mounted and facts.solution == self.solution:
            self._facts, self._facts_by = facts, fronts
            self._controller.withdraw(_COMPUTING)
            self._draw()
            if self._applies:
                # As if Enter were pressed now, so that the tour sees it, too.
                self.app.call_later(self.app.run_action, "apply", self)

    # -- drawing -------------------------------------------------------------------------------------------------

    def _draw(self) -> None:
        if self.front is None or not self.is_mounted or self.view.report is None:
            return
        limits = "  ".join(printable(line, 40) for line in self.view.limits.lines) or "no limits: / sets one"
        title = Text(no_wrap=True, overflow="ellipsis")
        title.append(" Pareto front ", style="bold")
        title.append(f"point {self.index + 1} of {len(self.front.points)}", style="dim")
        if self.within is not None:
            title.append("  best within the budget", style="bold")
        elif self.view.limits.budget is not None:
            smallest = self.front.size_of(self.front.points[0])
            if smallest > self.view.limits.budget:
                title.append(f"  nothing fits: the smallest has {human_bytes(smallest)}", style="bold")
        title.append(f"  loads in {LOADERS[self.front.formats]}", style="dim")
        if scan := self.view.progress_words:
            title.append(f"  {scan}", style="bold")
        if self.zoom > 1:
            title.append(f"  {self.zoom} x zoom", style="dim")
        title.append(f"  {limits}", style="dim")
        self.query_one("#front-title", Static).update(title)
        keys = " ←→ walk  Enter applies  f loads in  / limit  + - zoom  c compares  m measures  Esc closes"
        if self.size.width < len(keys):
            keys = " ←→ Enter applies  f loads in  / limit  c compares  m measures  Esc closes"
        self.query_one("#front-keys", Static).update(Text(keys, style="dim", no_wrap=True, overflow="ellipsis"))
        self._find_rules()
        self._plot()
        self.query_one("#front-point", Static).update(self._point())

    def _plot(self) -> None:
        assert self.front is not None
        assert self.view.report is not None
        solution = self.solution
        assert solution is not None
        widget = self.query_one("#front-plot", Static)
        scale, unit = self._unit
        budget = self.view.limits.budget
        points = [(self.front.size_of(point) / scale, point.predicted) for point in self.front.points]
        measured = [(size / scale, drift) for size, drift in self._measured()]
        here = self.front.size_of(solution) / scale, solution.score
        inside = [point for point in points if self._in_view(point[0], points)]
        axes = axes_around([*inside, *(point for point in measured if self._in_view(point[0], points)), here])
        series = (Series(points, style="dim"), Series(measured, "x", "bold"), Series((here,), "O", ACCENT))
        line = budget / scale if budget is not None else None
        widget.update(plot(series, axes, max(20, widget.size.width), max(6, widget.size.height), line))
        marks = [("⠒ predicted", "dim"), ("O here", ACCENT), ("x measured", "bold")]
        if budget is not None:
            marks.append(("| budget", "yellow"))
        length = sum(len(mark) for mark, _ in marks)
        of = "planned" if self.front.by == "bytes" else "read for a token"
        words = f" across: {unit} {of}, up: {self.view.report.unit} "
        if self.size.width < len(words) + length + 2 * len(marks):
            words = f" {unit}, {self.view.report.unit}"
        gap = "  " if self.size.width >= len(words) + length + 2 * len(marks) else " "
        legend = Text(words, style="dim", no_wrap=True)
        for mark, style in marks:
            legend.append(gap).append(mark, style=style)
        self.query_one("#front-legend", Static).update(legend)

    @property
    def _unit(self) -> tuple[int, str]:
        """The unit of the horizontal axis, such as (2**20, "MiB")."""
        stored = self.experiment.tree.stored_bytes
        return next(pair for pair in _UNITS if stored >= pair[0] or pair[0] == 1)

    def _in_view(self, x: float, points: Sequence[tuple[float, float]]) -> bool:
        """Return whether `x` is within the zoomed range around the cursor. points: those of the front, in the plot's units."""
        if self.zoom == 1:
            return True
        width = (points[-1][0] - points[0][0]) / self.zoom
        return abs(x - points[self.index][0]) <= width / 2

    def _measured(self) -> list[tuple[int, float]]:
        """Return (bytes, drift) of each recipe measured on the current inputs and settings. The drift is in the scan's unit."""
        experiment = self.experiment
        distribution = self.view.report is not None and self.view.report.unit != SQUARED
        now = experiment.model.inputs, experiment.settings
        entries = [entry for entry in experiment.measured if (entry.inputs, entry.settings) == now]
        drifts = [(self._size_of(entry.recipe, entry.planned_bytes), entry.drift(distribution)) for entry in entries]
        return [(size, drift) for size, drift in drifts if drift is not None]

    def _point(self) -> Text:
        solution, recipe, report = self.solution, self.recipe, self.view.report
        assert solution is not None
        assert report is not None
        size, stored = solution.bytes, self.experiment.tree.stored_bytes
        text = Text()
        text.append(human_bytes(size), style="bold")
        if self.view.has_caches:
            caches = human_bytes(self._cache_bytes(solution.dtypes))
            text.append(f"  of which KV cache {caches} at {self.experiment.context_words}   ", style="dim")
        else:
            text.append(f"  {100 * size / stored:.1f} % of stored   " if stored else "   ", style="dim")
        text.append(f"predicted {figure(solution.score)}", style="bold")
        if solution.active_bytes not in (None, size):
            text.append(f"  a token reads {human_bytes(solution.active_bytes or 0)}", style="dim")
        known = self.point_measurement()
        if known is not None:
            text.append(f"  measured {figure(known.measured)}", style="bold")
            if known.predicted > 0 and math.isfinite(known.measured):
                text.append(f" ({known.measured / known.predicted:.2f} x)", style="dim")
        elif recipe == self.experiment.recipe:
            text.append("  measuring…", style="dim")
        width = max(20, self.size.width - 4)
        for line in loading_lines(self.facts.loadings, width) if self.facts is not None else ():
            text.append(f"\n{line}")
        for note in self.facts.notes if self.facts is not None else ():
            text.append(f"\n{note}", style="bold")
        if recipe is None:
            words = ": applied when they are known" if self._applies else "…"
            text.append(f"\nComputing its rules{words}", style="bold" if self._applies else "dim")
        elif not recipe.rules:
            text.append("\nNo rules: every tensor is as stored.", style="dim")
        for rule in recipe.rules if recipe is not None else ():
            dtype = "stored" if rule.dtype == dtypes.STORED else dtypes.short_name(rule.dtype)
            width = max(20, self.size.width - 16)
            text.append(f"\n{truncate(printable(rule.pattern, 500), width)} → ", style="")
            text.append(dtype, style=f"bold {colour(rule.dtype)}")
        for reason in loading_reasons(self.facts.loadings) if self.facts is not None else ():
            text.append(f"\n{printable(reason, 500)}", style="dim")
        others = [point for point in self.view.measured if point is not known]
        if others:
            text.append("\n\nmeasured before: bytes, predicted, measured", style="dim")
            for point in reversed(others[-6:]):
                total = human_bytes(self._measured_bytes(point.recipe, point.bytes))
                text.append(f"\n{total:>10}  {figure(point.predicted):>8}  {figure(point.measured):>8}")
        return text

    def point_measurement(self) -> Point | None:
        recipe = self.recipe
        return next((point for point in self.view.measured if recipe is not None and point.recipe == recipe), None)

    # -- keys ----------------------------------------------------------------------------------------------------

    def action_walk(self, step: int) -> None:
        if self.front is not None:
            self.within, self._applies = None, False
            self._controller.withdraw(self._warning)  # it was about another point
            self.index = max(0, min(len(self.front.points) - 1, self.index + step))
            self._draw()

    def action_end(self, direction: int) -> None:
        if self.front is not None:
            self.action_walk(direction * len(self.front.points))

    def action_apply(self) -> None:
        recipe = self.recipe
        if recipe is None:
            self._applies = self.front is not None
            self._draw()
            return
        self._applies = False
        if not self._controller.apply_recipe(recipe):
            self._warn("this point is already applied")
        self._draw()

    def action_loader(self) -> None:
        """Restrict the front to what the next program loads."""
        if self.front is None:
            return
        names = self.experiment.loaders
        if len(names) < 2:
            self._warn(f"only {LOADERS[names[0]]} loads an export of this model")
            return
        at = names.index(self.front.formats)
        for name in (*names[at + 1 :], *names[:at]):  # one that can't meet the limits is said, and left out
            if self._make(self.view.limits.with_line(f"formats {name}", self.experiment.tree.stored_bytes)):
                return

    def action_zoom(self, factor: float) -> None:
        self.zoom = min(_MOST_ZOOM, max(1, int(self.zoom * factor)))
        self._draw()

    def action_compare(self) -> None:
        recipe = self.recipe
        if recipe is None:
            self._warn(_COMPUTING)
            return
        from dtype_tui.screens.comparison import comparison_screen, side_of_recipe

        point = side_of_recipe(self.experiment, recipe, "point")
        current = side_of_recipe(self.experiment, self.experiment.recipe, "current")
        self.app.push_screen(comparison_screen(self.experiment, point, current))

    def action_measure(self) -> None:
        """Measure the recipe under the cursor and its neighbors: in parallel if there are several worker processes."""
        front, here = self.front, self.solution
        if front is None or here is None:
            return
        first = max(0, min(self.index - _AROUND, len(front.points) - 1 - 2 * _AROUND))
        near = [front.solution_at(index) for index in range(first, min(len(front.points), first + 2 * _AROUND + 1))]
        solutions = [here, *(solution for solution in near if solution != here)]
        self._controller.notify("measuring this point and its neighbors", "information")

        def find() -> None:
            recipes = [minimize(self.experiment.tree, solution.dtypes) for solution in solutions]
            self.app.call_from_thread(self._controller.measure_recipes, recipes)

        self.run_worker(find, thread=True)

    def action_undo(self) -> None:
        self._controller.undo()

    def action_type(self) -> None:
        field = self.query_one(LineInput)
        field.add_class("open")
        self.set_focus(field)

    def _enter(self, line: str) -> None:
        line = line.strip()
        if line:
            try:
                tree = self.experiment.tree
                limits = self.view.limits.with_line(line, tree.stored_bytes, tree.active_bytes())
            except UserError as error:
                self._warn(str(error))
                return
            if not self._make(limits):
                return
        self._controller.withdraw(self._warning)  # the line is right now, or empty
        self._close_input()

    def _close_input(self) -> None:
        field = self.query_one(LineInput)
        field.value = ""
        field.remove_class("open")
        self.set_focus(None)

    def action_leave(self) -> None:
        if self.query_one(LineInput).has_class("open"):
            self._close_input()
        else:
            self.dismiss(None)

    def _warn(self, text: str) -> None:
        self._warning = text
        self._controller.notify(text, "warning")
