"""Finds the best recipe for a budget by solving a multiple-choice knapsack problem over size and predicted drift.

An item is a weight, or several weights that must have the same format. Its choices are the dtypes that it may have. The lower
convex hulls of all items, merged by slope, give the Pareto front: according to the scores, no mix of dtypes is both smaller and
better than a point of the front. For a budget between two points, the best mix is found exactly: Lagrangian bounds exclude all but
a few choices, and these few are enumerated.

The hulls are from P. Sinha and A. A. Zoltners, "The Multiple-Choice Knapsack Problem" (Operations Research 27, 1979). That few
choices remain is from D. Pisinger, "A Minimal Algorithm for the Multiple-Choice Knapsack Problem" (European Journal of Operational
Research 83, 1995). This module avoids torch and numpy, because the app moves along the front while keys are pressed.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dtype_engine.core import dtypes
from dtype_engine.core.draft_heads import NOT_RUN, WORDS
from dtype_engine.core.errors import OutOfReach, UserError
from dtype_engine.core.hints import hint
from dtype_engine.core.kv_cache import KVCacheTensor
from dtype_engine.core.kv_formats import SCANNED, names_states_alone
from dtype_engine.core.text import brief, printable
from dtype_engine.core.token_reads import most_units, rounded_bytes
from dtype_engine.core.tree import Tree, ancestors
from dtype_engine.core.units import human_bytes, plural
from dtype_engine.recipe import Rule, Selection, explain_no_match, select
from dtype_engine.recipe.loading import LOADERS, OWN
from dtype_engine.recipe.serving_memory import cache_tensor_bytes, written_in
from dtype_engine.results.scan import FrontPoint, at_even_steps
from dtype_engine.results.thresholds import told_apart
from dtype_engine.search.families import Loadable, stays_wide

_MOST_STATES = 20_000
SizeKind = Literal["bytes", "active"]


@dataclass(frozen=True, slots=True)
class Choice:
    """One possible dtype of an `Item`, with the size of the item's weights in this dtype, and the drift that a scan predicts."""

    dtype: str
    bytes: int
    score: float
    roundings: tuple[str, ...] = ()
    """The dtype of each of the item's weights, if they have the format `dtype` in different roundings."""
    active: int = 0
    """How much of the weights a token is expected to read, as a number of `Tree.read_units`; 0 if that is unknown."""

    def size(self, by: SizeKind) -> int:
        """Return the bytes, or `active`."""
        return self.active if by == "active" else self.bytes


@dataclass(frozen=True, slots=True)
class Item:
    """Weights that must have the same format, in any rounding. `choices` are sorted by size; none is smaller and drifts less than
    another.
    """

    weights: tuple[str, ...]
    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True)
class Constraints:
    """Constraints on the recipe that a search finds. Limits on bytes and drift are given separately."""

    keep: tuple[str, ...] = ()
    """Patterns, such as `*norm*`, of weights that keep their stored dtype."""
    groups: tuple[str, ...] = ()
    """Patterns such as `*.{q,k,v}_proj`. All weights that one of them matches in the same parent module get the same dtype, or
    the same format in different roundings.
    """
    dtypes: tuple[str, ...] = ()
    """The dtypes that are allowed in addition to the stored dtype. If empty, all scanned dtypes are allowed."""
    only: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Pairs (pattern, dtypes): a weight that matches the pattern may have only these dtypes. The last matching pattern decides. A
    norm, bias or router may have a format with scales only if one of these patterns matches it.
    """
    context: int | None = None
    """The number of tokens for which the bytes include KV caches, whose formats the search then also chooses. None: without KV
    caches.
    """
    batch: int = 1
    """The number of sequences in the KV caches. It counts only if `context` is given."""
    formats: str = ""
    """The program that is to load the export, a name in `families.FAMILIES`: weights get only dtypes in which it can load them. ""
    is no limit in this module; the session replaces it by the program that loads the model.
    """
    by: SizeKind = "bytes"
    """The size that is limited, and traded against drift: "bytes" of the whole model, or "active", the bytes of weights that a
    token is expected to read.
    """


@dataclass(frozen=True, slots=True)
class Solution:
    """A result of a search: the dtype of every weight by name, the bytes of the whole model, and the predicted drift."""

    dtypes: Mapping[str, str]
    bytes: int
    score: float
    active_bytes: int | None = None
    """The bytes of weights that a token is expected to read, without KV caches, or None if they are unknown."""


def make_items(
    tree: Tree, scores: Mapping[tuple[str, str], float], constraints: Constraints = Constraints()
) -> list[Item]:
    """Return the items of a search. scores: the drift by (weight, dtype). Raises UserError for unmatched patterns, unscanned
    dtypes, and weights for which no common dtype is allowed.
    """
    weights = tree.searched
    scanned = {dtype for _, dtype in scores}
    weights_of_model = frozenset(weights)
    loadable = Loadable(tree, constraints.formats or OWN, scanned)
    of_states = {pattern: only for pattern, only in constraints.only if names_states_alone(pattern)}
    chosen = [(pattern, only) for pattern, only in constraints.only if pattern not in of_states]
    for dtype in (*constraints.dtypes, *(dtype for _, only in chosen for dtype in only)):
        if dtype != dtypes.STORED and dtype not in scanned:
            raise UserError(f"{dtype} was not scanned: scan with it, or choose among {', '.join(sorted(scanned))}")
    allowed: dict[str, frozenset[str]] = {}
    for pattern, only in chosen:
        taken = _taken(tree, pattern)
        if taken.tensors and all(name in tree.of_draft for name in taken.tensors):
            raise UserError(
                f"{printable(pattern)} selects only the {WORDS}, which a search leaves as stored, since {NOT_RUN}; add a rule for "
                "it to the recipe"
            )
        allowed |= dict.fromkeys((*taken.tensors, *taken.caches), frozenset(only))
        for dtype in only:
            if dtype != dtypes.STORED and not dtype.startswith(SCANNED):
                of_pattern = [name for name in taken.tensors if name in weights_of_model]
                loadable.require(dtype, of_pattern, f"{printable(pattern)}={dtypes.short_name(dtype)}")
    kept = {
        name for each in constraints.keep for taken in (_taken(tree, each),) for name in (*taken.tensors, *taken.caches)
    }
    general = frozenset(constraints.dtypes or scanned) | {dtypes.STORED}
    of_weights = {dtype for dtype in scanned if not dtype.startswith(SCANNED)}
    items = []
    for group in _groups(tree, weights, (*loadable.groups, *constraints.groups), loadable.alike):
        choices: dict[str, Choice] = {}
        for dtype, roundings in _formats({*of_weights, *(tree.tensors[name].dtype for name in group)}).items():
            of_names = {
                name: [
                    each for each in roundings
                    if _may_be(tree, name, each, kept, allowed.get(name, general), name in allowed)
                    and loadable.refusal(name, each) is None
                ]
                for name in group
            }  # fmt: skip
            if all(of_names.values()):
                choices[dtype] = _choice(loadable, scores, of_names)
        if not choices:
            names = ", ".join(group[:3]) + (", …" if len(group) > 3 else "")
            raise UserError(
                f"no dtype is left for {names}, which must have the same: some are kept, or allowed other dtypes"
            )
        items.append(Item(group, _undominated(choices.values(), constraints.by)))
    states = _state_formats(tree, of_states)
    if constraints.context is not None:
        for tensor in tree.kv_cache.tensors:
            may_be = frozenset() if tensor.name in kept else allowed.get(tensor.name, general)
            items.append(_cache_item(tree, tensor, scores, states.get(tensor.name), may_be, constraints))
    return items


def _cache_item(
    tree: Tree,
    tensor: KVCacheTensor,
    scores: Mapping[tuple[str, str], float],
    of_state: str | None,
    may_be: frozenset[str],
    constraints: Constraints,
) -> Item:
    """Return the item of a tensor of the KV cache. of_state: the format that the user sets for a recurrent state, or None. may_be:
    the formats that are allowed otherwise.
    """
    if of_state is not None:
        scores, may_be = {(tensor.name, of_state): 0.0}, frozenset((of_state,))
    return Item((tensor.name,), _cache_choices(tree, tensor, scores, may_be, constraints))


def _state_formats(tree: Tree, of_states: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the format of each recurrent state that the user sets, such as `kv:bfloat16`. A scan does not score states, so there
    is nothing to choose. of_states: the formats, keyed by pattern. Raises UserError if a pattern has several.
    """
    found: dict[str, str] = {}
    for pattern, only in of_states.items():
        if len(only) > 1:
            raise UserError(f"{printable(pattern)}: recurrent states have no scores to choose by, so give one format")
        rule = Rule.make(pattern, only[0].removeprefix(SCANNED))
        taken = _taken(tree, pattern).with_caches(rule.dtype)
        if not taken:
            raise UserError(explain_no_match(tree, pattern, taken, rule.dtype))
        found |= dict.fromkeys(taken.caches, only[0])
    return {name: form for name, form in found.items() if form != dtypes.STORED}


def _formats(of_weights: Iterable[str]) -> dict[str, list[str]]:
    """Return the dtypes of each format: its own name if it was scanned, and those of its roundings."""
    formats: dict[str, list[str]] = {}
    for dtype in sorted(of_weights):
        formats.setdefault(dtypes.unrounded(dtype), []).append(dtype)
    return formats


def _choice(
    loadable: Loadable, scores: Mapping[tuple[str, str], float], of_names: Mapping[str, Sequence[str]]
) -> Choice:
    """Return the choice in which each weight has the rounding with the lowest score. of_names: the roundings of one format that
    each weight may have.
    """

    def score(name: str, dtype: str) -> float:
        return scores.get((name, dtype), math.inf)

    best = {name: min(those, key=lambda dtype: score(name, dtype)) for name, those in of_names.items()}
    parts = [score(*each) for each in best.items()]
    tree, family = loadable.tree, loadable.family
    sizes = {name: family.nbytes(tree.tensors[name], dtype) for name, dtype in best.items()}
    active = sum(tree.active_units(tree.tensors[name], nbytes) for name, nbytes in sizes.items())
    first, *others = set(best.values())
    mixed = tuple(best.values()) if others else ()
    dtype = dtypes.unrounded(first) if others else first
    total = math.fsum(parts) if all(map(math.isfinite, parts)) else math.inf
    return Choice(dtype, sum(sizes.values()), total, mixed, active)


def _cache_choices(
    tree: Tree,
    tensor: KVCacheTensor,
    scores: Mapping[tuple[str, str], float],
    allowed: frozenset[str],
    constraints: Constraints,
) -> tuple[Choice, ...]:
    """Return the possible formats of a KV cache tensor. allowed: the formats that the user allows, such as `kv:fp8`.

    `dtypes.STORED` stands for the format that the model writes without a rule, whose drift is 0. `STORED` is left out if `allowed`
    names only other formats and a scan has scored at least one of them.
    """
    context, batch = constraints.context or 0, constraints.batch
    choices = [
        Choice(
            form.removeprefix(SCANNED), cache_tensor_bytes(tensor, form.removeprefix(SCANNED), context, batch), score
        )
        for (name, form), score in scores.items()
        if name == tensor.name and form in allowed
    ]
    if not choices or not allowed or dtypes.STORED in allowed:
        form = written_in(tensor, written_dtype(tree))
        choices.append(Choice(dtypes.STORED, cache_tensor_bytes(tensor, form, context, batch), 0.0))
    return _undominated(choices, constraints.by)


def written_dtype(tree: Tree) -> str:
    """Return the dtype in which the model is assumed to compute, for `written_in`: the dtype of most weights, or bfloat16."""
    most = next(iter(tree.totals()[""].mix()), ("", 0.0))[0]
    return most if most in dtypes.COMPUTE_DTYPES else "bfloat16"


def _taken(tree: Tree, pattern: str) -> Selection:
    taken = select(tree, pattern)
    if not taken:
        raise UserError(explain_no_match(tree, pattern, taken))
    return taken


def _may_be(tree: Tree, name: str, dtype: str, kept: set[str], allowed: frozenset[str], asked_for: bool) -> bool:
    stored = tree.tensors[name].dtype
    if name in kept or dtype not in dtypes.BY_NAME:  # a dtype that only its file format knows can't be cast to
        return dtype == stored
    if dtype in dtypes.STORAGE_DTYPES and not asked_for and stays_wide(tree, name):
        return False
    return dtype in allowed or (dtype == stored and dtypes.STORED in allowed)


def _groups(tree: Tree, weights: Sequence[str], patterns: Iterable[str], alike: Sequence[str]) -> list[tuple[str, ...]]:
    """Divide weights into groups, each of which must have one dtype. Weights in the same parent module form a group if one of
    `patterns` matches them all. The weights in `alike` form a group, too. Groups that share a weight are merged.
    """
    leader = {name: name for name in weights}

    def find(name: str) -> str:
        while leader[name] != name:
            leader[name] = leader[leader[name]]
            name = leader[name]
        return name

    for name in alike:
        if name in leader:
            leader[find(name)] = find(next(first for first in alike if first in leader))
    for pattern in patterns:
        taken = _taken(tree, pattern)
        first: dict[str, str] = {}
        for name in taken.tensors:
            if name not in leader:
                continue
            outermost = name
            for alias in tree.tensors[name].names:
                inside = [module for module in ancestors(alias) if module and module in taken.modules]
                outermost = inside[-1] if inside else outermost
            parent = outermost.rpartition(".")[0]
            leader[find(name)] = find(first.setdefault(parent, name))
    groups: dict[str, list[str]] = {}
    for name in weights:
        groups.setdefault(find(name), []).append(name)
    return [tuple(group) for group in groups.values()]


def _undominated(choices: Iterable[Choice], by: SizeKind) -> tuple[Choice, ...]:
    """Return the choices that no other beats in both size and drift, sorted by size. Of equal choices, the widest stays."""
    # A dtype that only its file format knows, such as GGUF's q4_k, is the stored one.
    bits = {name: known.bits for name, known in dtypes.BY_NAME.items()}
    ordered = sorted(choices, key=lambda each: (each.size(by), each.score, -bits.get(each.dtype, math.inf)))
    best: list[Choice] = []
    for choice in ordered:
        if not best or choice.score < best[-1].score:
            best.append(choice)
    finite = [choice for choice in best if math.isfinite(choice.score)]
    return tuple(finite or best[:1])


@dataclass
class ParetoFront:
    """The Pareto front of size against predicted drift. From each point to the next, one item gets a larger dtype."""

    items: Sequence[Item]
    fixed: int = 0
    """Bytes of the tensors whose dtype never changes, such as integers and quantized weights."""
    formats: str = OWN
    """The program that loads an export of every point, a name in `families.FAMILIES`."""
    by: SizeKind = "bytes"
    """The size that is traded against drift, as in `Constraints`. Limits and comparisons of sizes are in bytes of this kind."""
    fixed_active: int = 0
    """What a token reads of the tensors whose dtype never changes, as a number of `units`."""
    units: int | None = None
    """How many units of `Choice.active` make a byte. None if it is unknown what a token reads."""
    points: list[FrontPoint] = field(init=False)
    """For each point, the bytes of the whole model and the predicted drift."""
    _steps: list[tuple[int, int]] = field(init=False)
    _slopes: list[float] = field(init=False)

    def __repr__(self) -> str:
        first, last = self.points[0], self.points[-1]
        return brief(
            f"ParetoFront: {plural(len(self.points), 'point')} that {LOADERS[self.formats]} loads",
            ("from", f"{human_bytes(first.bytes)}, predicted {first.predicted:.4e}"),
            ("to", f"{human_bytes(last.bytes)}, predicted {last.predicted:.4e}"),
        )

    def __post_init__(self) -> None:
        steps: list[tuple[float, int, int]] = []
        for index, item in enumerate(self.items):
            hull = _hull(item.choices, self.by)
            steps += [
                (_slope(item.choices[low], item.choices[high], self.by), index, high)
                for low, high in itertools.pairwise(hull)
            ]
        # The slopes of one item fall along its hull, so this order keeps the steps of each item in sequence.
        steps.sort(key=lambda step: -step[0])
        self._steps = [(index, choice) for _, index, choice in steps]
        self._slopes = [slope for slope, _, _ in steps]
        chosen = [0] * len(self.items)
        size, scores = self._size(chosen, "bytes"), [item.choices[0].score for item in self.items]
        active = self._size(chosen, "active")
        self.points = [FrontPoint(size, math.fsum(scores), self._active_bytes(active))]
        total = self.points[0].predicted
        for index, choice in self._steps:
            before, after = self.items[index].choices[chosen[index]], self.items[index].choices[choice]
            chosen[index] = choice
            size += after.bytes - before.bytes
            active += after.active - before.active
            total += after.score - before.score
            self.points.append(FrontPoint(size, max(0.0, total), self._active_bytes(active)))

    def _active_bytes(self, active: int) -> int | None:
        return None if self.units is None else rounded_bytes(active, self.units)

    def size_of(self, found: FrontPoint | Solution) -> int:
        """Return the bytes of a point or a solution, of the kind `by`."""
        return found.bytes if self.by == "bytes" else found.active_bytes or 0

    def solution_at(self, index: int) -> Solution:
        return self.solution(self._chosen(index))

    def best_within(self, budget: int) -> Solution | None:
        """Return the solution with the lowest predicted drift in at most `budget` bytes, or None if even the smallest is larger."""
        index = bisect.bisect_right(self.points, budget, key=self.size_of) - 1
        if index < 0:
            return None
        start = self._chosen(index)
        if index < len(self._steps):
            unit = self._unit
            table = [[(choice.score, choice.size(self.by) / unit) for choice in item.choices] for item in self.items]
            limit = budget if self.by == "bytes" else most_units(budget, unit)
            start = knapsack(table, (limit - self._fixed(self.by)) / unit, self._slopes[index] * unit, start)
        return self.solution(start)

    def smallest_reaching(self, most: float) -> Solution | None:
        """Return the smallest solution whose predicted drift is at most `most`, or None if there is no such solution."""
        index = bisect.bisect_left(range(len(self.points)), True, key=lambda at: self._score(self._chosen(at)) <= most)
        if index == len(self.points):
            return None
        start = self._chosen(index)
        if index > 0 and self._slopes[index - 1] > 0:
            unit = self._unit
            table = [[(choice.size(self.by) / unit, choice.score) for choice in item.choices] for item in self.items]
            start = knapsack(table, most, 1 / (self._slopes[index - 1] * unit), start)
        return self.solution(start)

    def solve(self, budget: int | None = None, max_drift: float | None = None) -> Solution:
        """Return the solution with the lowest predicted drift in `budget` bytes, or the smallest one whose predicted drift is at
        most `max_drift`. Raises UserError unless exactly one limit is given, and OutOfReach if no solution meets it.
        """
        if (budget is None) == (max_drift is None):
            raise UserError("a search needs either a budget in bytes or the largest drift that is allowed")
        nothing, wider = "nothing", ""
        if self.formats != OWN:
            nothing, wider = f"nothing that {LOADERS[self.formats]} loads", f"; {hint('formats')}"
        if budget is not None:
            within = self.best_within(budget)
            if within is None:
                smallest, fits = self.size_of(self.points[0]), f"fits in {budget:,} bytes"
                if self.by == "active":
                    fits = f"reads at most {budget:,} bytes for a token"
                raise OutOfReach(f"{nothing} {fits}: the smallest is {smallest:,} bytes{wider}")
            return within
        assert max_drift is not None
        reaching = self.smallest_reaching(max_drift)
        if reaching is None:
            best, most = told_apart(self.points[-1].predicted, max_drift, 4)
            raise OutOfReach(f"{nothing} drifts by {most} or less: the lowest predicted drift is {best}")
        return reaching

    def candidates(self, budget: int | None, max_drift: float | None, count: int) -> tuple[Solution, ...]:
        """Return up to `count` solutions: the best one under a limit, which `solve` returns, then points of the front that are near
        the best one in bytes. With a limit on bytes, these points need no more bytes than the best one. With a limit on drift, they
        may need more, because the drift is only predicted and may be too high. Raises what `solve` raises.

        Without a limit (both None), the solutions are spread over the front: the smallest, the largest, and others at even steps.
        """
        if budget is None and max_drift is None:
            return tuple(map(self.solution_at, at_even_steps(range(len(self.points)), count)))
        first, sizes = self.solve(budget, max_drift), list(map(self.size_of, self.points))
        if budget is not None:
            near = [index for index in reversed(range(len(sizes))) if sizes[index] <= self.size_of(first)]
        else:
            near = sorted(range(len(sizes)), key=lambda index: abs(sizes[index] - self.size_of(first)))
        others = [solution for solution in map(self.solution_at, near[:count]) if solution.dtypes != first.dtypes]
        return first, *others[: count - 1]

    @property
    def _unit(self) -> int:
        return 1 if self.by == "bytes" else self.units or 1

    def _fixed(self, by: SizeKind) -> int:
        return self.fixed if by == "bytes" else self.fixed_active

    def _size(self, chosen: Sequence[int], by: SizeKind) -> int:
        sizes = (item.choices[choice].size(by) for item, choice in zip(self.items, chosen, strict=True))
        return self._fixed(by) + sum(sizes)

    def _score(self, chosen: Sequence[int]) -> float:
        return math.fsum(item.choices[choice].score for item, choice in zip(self.items, chosen, strict=True))

    def _chosen(self, steps: int) -> list[int]:
        chosen = [0] * len(self.items)
        for index, choice in self._steps[:steps]:
            chosen[index] = choice
        return chosen

    def solution(self, chosen: Sequence[int]) -> Solution:
        """Return a solution. chosen: for each item, the dtype's index in `Item.choices`."""
        planned: dict[str, str] = {}
        for item, choice in zip(self.items, chosen, strict=True):
            taken = item.choices[choice]
            planned |= zip(item.weights, taken.roundings or [taken.dtype] * len(item.weights), strict=True)
        active = self._active_bytes(self._size(chosen, "active"))
        return Solution(planned, self._size(chosen, "bytes"), self._score(chosen), active)


def make_front(
    tree: Tree, scores: Mapping[tuple[str, str], float], constraints: Constraints = Constraints()
) -> ParetoFront:
    """Return the Pareto front of a model. The arguments and errors are those of `make_items`; UserError is also raised if the front
    is to be by what a token reads, and that is unknown.
    """
    if constraints.by == "active" and (why := tree.token_reads.none_because) is not None:
        raise UserError(f"it is unknown which weights a token reads, so that they can't be limited: {why}")
    items = make_items(tree, scores, constraints)
    changing = {name for item in items for name in item.weights if name in tree.tensors}
    fixed = [tensor for name, tensor in tree.tensors.items() if tensor.counted and name not in changing]
    return ParetoFront(
        items,
        sum(tensor.nbytes for tensor in fixed),
        constraints.formats or OWN,
        constraints.by,
        sum(tree.active_units(tensor, tensor.nbytes) for tensor in fixed),
        tree.read_units if tree.token_reads.none_because is None else None,
    )


def _slope(low: Choice, high: Choice, by: SizeKind) -> float:
    """Return how much an item's predicted drift decreases per additional unit of size if the larger `high` replaces `low`."""
    return (low.score - high.score) / (high.size(by) - low.size(by)) if math.isfinite(low.score) else math.inf


def _hull(choices: Sequence[Choice], by: SizeKind) -> list[int]:
    """Return the indices of the choices on the lower convex hull of predicted drift over size."""
    hull: list[int] = []
    for index in range(len(choices)):
        while len(hull) >= 2 and _slope(choices[hull[-2]], choices[hull[-1]], by) <= _slope(
            choices[hull[-1]], choices[index], by
        ):
            hull.pop()
        hull.append(index)
    return hull


@dataclass(frozen=True, slots=True)
class _State:
    """A partial solution of `knapsack`: choices for the first rows of the table. `weight`, `cost` and `used` are sums of the
    weights, costs and reduced costs. `choice` is the index chosen in the last of these rows, and `before` the partial solution for
    all earlier rows.
    """

    weight: float
    cost: float
    used: float
    choice: int
    before: _State | None


def knapsack(
    table: Sequence[Sequence[tuple[float, float]]], limit: float, price: float, start: Sequence[int]
) -> list[int]:
    """Choose one entry (cost, weight) from each row of `table` so that the sum of costs is minimal while the sum of weights is at
    most `limit`. Returns the index of the entry chosen in each row. A weight here is a number, such as bytes, and not a tensor.

    start: the indices of any solution within the limit. price: the Lagrange multiplier p, which is the cost of a unit of weight.
    The reduced cost of an entry is its cost + p·weight minus the minimum of this sum in its row. In a solution better than `start`,
    the reduced costs sum to at most the cost of `start` minus the Lagrangian bound. This excludes most entries. The result is exact
    if at most 20,000 partial solutions remain. Otherwise, only those with the smallest reduced costs are continued.
    """
    least = [min(cost + price * weight for cost, weight in row) for row in table]
    best_cost = math.fsum(row[index][0] for row, index in zip(table, start, strict=True))
    gap = (best_cost + price * limit - math.fsum(least)) * (1 + 1e-9) + 1e-300
    open_rows: list[tuple[int, list[tuple[float, int]]]] = []
    chosen = list(start)
    fixed_weight = fixed_cost = 0.0
    for index, row in enumerate(table):
        left = [
            (max(0.0, cost + price * weight - least[index]), choice)
            for choice, (cost, weight) in enumerate(row)
            if cost + price * weight - least[index] <= gap
        ]
        if len(left) <= 1:
            choice = left[0][1] if left else start[index]
            chosen[index] = choice
            fixed_cost += row[choice][0]
            fixed_weight += row[choice][1]
        else:
            open_rows.append((index, left))
    lightest = [min(table[index][choice][1] for _, choice in left) for index, left in open_rows]
    remaining = math.fsum(lightest)
    states = [_State(fixed_weight, fixed_cost, 0.0, -1, None)]
    for (index, left), light in zip(open_rows, lightest, strict=True):
        remaining -= light
        grown = [
            _State(state.weight + table[index][choice][1], state.cost + table[index][choice][0], used, choice, state)
            for state in states
            for reduced, choice in left
            if (used := state.used + reduced) <= gap
            and state.weight + table[index][choice][1] + remaining <= limit * (1 + 1e-12)
        ]
        states = _pareto(grown)
        if len(states) > _MOST_STATES:
            states = sorted(states, key=lambda state: state.used)[:_MOST_STATES]
    for end in sorted(states, key=lambda state: state.cost):
        candidate, state = list(chosen), end
        for index, _ in reversed(open_rows):
            candidate[index] = state.choice
            assert state.before is not None
            state = state.before
        if math.fsum(table[index][choice][1] for index, choice in enumerate(candidate)) <= limit:
            cost = math.fsum(table[index][choice][0] for index, choice in enumerate(candidate))
            return candidate if cost < best_cost else list(start)
    return list(start)


def _pareto(states: list[_State]) -> list[_State]:
    """Return the partial solutions that no other beats in weight and cost, sorted by weight."""
    states.sort(key=lambda state: (state.weight, state.cost))
    best: list[_State] = []
    for state in states:
        if not best or state.cost < best[-1].cost:
            best.append(state)
    return best
