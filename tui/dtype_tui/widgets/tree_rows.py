"""The rows of the module tree and their order. The rows are those of open nodes or, with a filter, those of matching nodes.
Neighbours that are alike may be folded into one row.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import translate
from typing import TYPE_CHECKING

from dtype_engine.core.tree import Module, TensorInfo, Tree, ancestors
from dtype_tui.state.folds import Members, fold_label, fold_name

if TYPE_CHECKING:
    from dtype_engine.results.drift import ModuleDrift
    from dtype_tui.state.experiment import Experiment

ORDERS = ("model", "bytes", "drift")
"""Orders in which a node's children can be shown: the model's order, by bytes (largest first), or by drift (worst first)."""
MOST_MATCHES = 1000
"""Maximum number of a filter's matches that are shown. Users do not step through more matches, and every key press computes the
matches again.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """A visible line of the tree: a module, one of its tensors, or a fold of modules that are alike."""

    name: str
    """The name of the node or, for a fold, the pattern that matches its members."""
    depth: int
    """Number of rows above this one in the tree: the ancestors of the node, and the folds that it is in."""
    module: Module
    """The module itself, the module that holds `tensor`, or the first member of the fold."""
    tensor: TensorInfo | None = None
    members: Members = ()
    """The modules that the row stands for if it is a fold; otherwise empty."""
    matches: int = 0
    """How many names that match the filter are inside the fold, if it is closed."""

    @property
    def label(self) -> str:
        return fold_label(self.members) if self.members else self.name.rpartition(".")[2]

    @property
    def modules(self) -> Members:
        """The modules that the row stands for: one, or the members of the fold."""
        return self.members or (self.module,)

    @property
    def can_open(self) -> bool:
        """Whether there are rows below this one while it is open."""
        return bool(self.members) or (self.tensor is None and bool(self.module.children or self.module.tensors))

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of the nodes that the row stands for: one, or the members of the fold."""
        return tuple(member.name for member in self.members) or (self.name,)

    @property
    def about(self) -> str:
        """A few words about the node: its class or shape or, for a fold, the numbers of its members and of the filter's matches."""
        if self.members:
            return f"{len(self.members)} alike" + (f", {self.matches:,} match" if self.matches else "")
        if self.tensor is not None:
            return f"[{' × '.join(map(str, self.tensor.shape))}]" if self.tensor.shape else "[scalar]"
        return self.module.class_name or ""

    @property
    def alias(self) -> bool:
        """Whether the row is a tensor that is tied to another tensor, whose name is the canonical one."""
        return self.tensor is not None and self.tensor.name != self.name


def first_opened(tree: Tree) -> set[str]:
    """Return the names of the nodes that are open at the start: from the root down to the first node with several children, and the
    children of that node. The children stay closed if there are more than 12, and so does a child with more than 64 children.
    """
    node = tree.root
    opened = {""}
    while len(node.children) == 1 and not node.tensors:
        node = next(iter(node.children.values()))
        opened.add(node.name)
    if len(node.children) <= 12:
        opened |= {child.name for child in node.children.values() if 0 < len(child.children) <= 64}
    return opened


ChildrenOf = Callable[[Module], Iterable[Members]]
"""A function that returns the children of a module in the order of their rows: the members of each fold together, others alone."""


def open_rows(tree: Tree, children_of: ChildrenOf, is_open: Callable[[Row], bool]) -> list[Row]:
    """Return the rows of all nodes that are visible because every node and fold above them is open."""
    rows: list[Row] = []
    stack = [Row("", 0, tree.root)]
    while stack:
        row = stack.pop()
        rows.append(row)
        if row.tensor is None and is_open(row):
            stack.extend(reversed(list(_rows_below(row, children_of))))
    return rows


def filtered_rows(
    tree: Tree, children_of: ChildrenOf, is_open: Callable[[Row], bool], matches: Iterable[str]
) -> list[Row]:
    """Return the rows of the nodes that match the filter, and of all nodes above them. Only folds can be closed."""
    counts = Counter(above for name in matches for above in (name, *ancestors(name)))
    rows: list[Row] = []
    stack = [Row("", 0, tree.root)]
    while stack:
        row = stack.pop()
        if row.members and not is_open(row):
            row = replace(row, matches=sum(counts[member.name] for member in row.members))
        rows.append(row)
        if row.tensor is None and not row.matches:
            below = list(_rows_below(row, children_of))
            stack.extend(each for each in reversed(below) if any(counts[name] for name in each.nodes))
    return rows


def _rows_below(row: Row, children_of: ChildrenOf) -> Iterator[Row]:
    depth = row.depth + 1
    if row.members:
        yield from (Row(member.name, depth, member) for member in row.members)
        return
    yield from _tensor_rows(row.module, depth)
    for members in children_of(row.module):
        first = members[0]
        yield (
            Row(first.name, depth, first)
            if len(members) == 1
            else Row(fold_name(members), depth, first, members=members)
        )


def matching(tree: Tree, text: str) -> list[str]:
    """Return the names of nodes that contain `text` or match it as a glob, ignoring case. An empty text matches no name."""
    if not text:
        return []
    wanted = text.lower()
    names, lowered = tree.names
    if any(character in wanted for character in "*?["):
        matches = re.compile(translate(wanted)).match
        return [name for name, low in zip(names, lowered, strict=True) if matches(low)]
    return [name for name, low in zip(names, lowered, strict=True) if wanted in low]


def ordered(experiment: Experiment, groups: list[Members], order: str) -> list[Members]:
    """Return the children of a node, of which some are folded, in one of `ORDERS`. A fold stands where all its bytes or its worst
    member put it.
    """
    if order == "bytes":
        return sorted(groups, key=lambda group: -experiment.totals.of(group).total_bytes)
    if order == "drift":
        modules = experiment.results.modules
        return sorted(groups, key=lambda group: min(_drift_key(modules.get(module.name)) for module in group))
    return groups


def worst_drift(drift: Mapping[str, ModuleDrift], modules: Members) -> ModuleDrift | None:
    """Return the drift of the module that drifts most, or None if none of them is measured."""
    if len(modules) == 1:
        return drift.get(modules[0].name)
    return min((drift[module.name] for module in modules if module.name in drift), key=_drift_key, default=None)


def _drift_key(drift: ModuleDrift | None) -> tuple[float, float]:
    """Return a sort key that puts the worst modules first and modules without a measurement last."""
    if drift is None or drift.sqnr_db is None:
        return (0.0, math.inf)
    return (-float(drift.nonfinite), drift.sqnr_db)


def _tensor_rows(node: Module, depth: int) -> list[Row]:
    prefix = f"{node.name}." if node.name else ""
    return [Row(prefix + local, depth, node, tensor) for local, tensor in node.tensors.items()]
