"""The rows of the module tree and their order. Without a filter, a node has a row if all nodes above it are open. With a filter,
the matching nodes and all nodes above them have rows. Neighbors that are alike may be folded into one row.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import translate
from typing import TYPE_CHECKING

import msgspec

from dtype_engine.core.tree import Module, TensorInfo, Tree, ancestors
from dtype_tui.state.folds import Members, fold_label, fold_name

if TYPE_CHECKING:
    from dtype_engine.results.drift import ModuleDrift
    from dtype_tui.state.experiment import Experiment

ORDERS = ("model", "bytes", "drift")
"""Orders of a node's children: the model's, by bytes (largest first), or by drift (worst first)."""
_LISTS = ("ModuleList", "ModuleDict")
"""Classes of modules that hold others and are never called."""
MOST_MATCHES = 1000
"""Maximum number of a filter's matches that are shown. Nobody steps through more, and every key press computes them again."""


class Row(msgspec.Struct, frozen=True):
    """A visible line of the tree: a module, one of its tensors, or a fold of modules that are alike."""

    name: str
    """The name of the node. For folded modules, the pattern that matches them, such as `model.layers.{2..9}`."""
    depth: int
    """The level of the row in the tree: 0 for the root."""
    module: Module
    """The module of the row: for a tensor, the module that holds it; for folded modules, the first."""
    tensor: TensorInfo | None = None
    members: Members = ()
    """The modules that are folded into this row, if any."""
    matches: int = 0
    """If this is a closed row of folded modules: how many nodes match the filter among them and below them."""

    @property
    def label(self) -> str:
        return fold_label(self.members) if self.members else self.name.rpartition(".")[2]

    @property
    def modules(self) -> Members:
        """The module of the row or, if several modules are folded into it, all of them."""
        return self.members or (self.module,)

    @property
    def can_open(self) -> bool:
        return bool(self.members) or (self.tensor is None and bool(self.module.children or self.module.tensors))

    @property
    def nodes(self) -> tuple[str, ...]:
        """The name of the node or, if several modules are folded into the row, their names."""
        return tuple(member.name for member in self.members) or (self.name,)

    @property
    def about(self) -> str:
        """The class of a module, the shape of a tensor, or the number of folded modules, such as "8 alike, 3 match"."""
        if self.members:
            return f"{len(self.members)} alike" + (f", {self.matches:,} match" if self.matches else "")
        if self.tensor is not None:
            return f"[{' × '.join(map(str, self.tensor.shape))}]" if self.tensor.shape else "[scalar]"
        return self.module.class_name or ""

    @property
    def sizes(self) -> str:
        """The numbers of inputs and outputs of a linear layer, such as `576 → 1536`, the shape of an embedding, or ""."""
        weight, class_name = self.module.tensors.get("weight"), self.module.class_name or ""
        is_module = self.tensor is None and not self.members
        if not is_module or weight is None or len(weight.shape) != 2:
            return ""
        if weight.packed_bytes is not None or weight.logical_numel is not None:  # the shape is of codes
            return ""
        rows, columns = weight.shape
        if class_name.endswith("Linear"):
            return f"{columns} → {rows}"
        return f"{rows} × {columns}" if class_name.endswith("Embedding") else ""

    @property
    def alias(self) -> bool:
        """Whether the row is a tied tensor under another name than its canonical name."""
        return self.tensor is not None and self.tensor.name != self.name


def first_opened(tree: Tree) -> set[str]:
    """Return the names of the nodes that are open at the start. These are the nodes from the root down to the first one with
    tensors or several children. If that one has at most 12 children, those with 1 to 64 children of their own are open, too.
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
"""Returns the rows of a module's children, in order: each a tuple of one module, or of the modules folded into the row."""


def open_rows(tree: Tree, children_of: ChildrenOf, is_open: Callable[[Row], bool]) -> list[Row]:
    """Return the rows of the tree without a filter."""
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
    """Return the rows of the tree with a filter, but none inside closed folds. matches: the names of the matching nodes."""
    counts = Counter(above for name in matches for above in (name, *ancestors(name)))
    rows: list[Row] = []
    stack = [Row("", 0, tree.root)]
    while stack:
        row = stack.pop()
        if row.members and not is_open(row):
            row = msgspec.structs.replace(row, matches=sum(counts[member.name] for member in row.members))
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
    prefix = f"{row.module.name}." if row.module.name else ""
    for local, tensor in row.module.tensors.items():
        yield Row(prefix + local, depth, row.module, tensor)
    for members in children_of(row.module):
        first = members[0]
        if len(members) == 1:
            yield Row(first.name, depth, first)
        else:
            yield Row(fold_name(members), depth, first, members=members)


def matching(tree: Tree, text: str) -> list[str]:
    """Return the names of nodes that contain `text` or match it as a glob, ignoring case. An empty text matches no name."""
    if not text:
        return []
    wanted = text.lower()
    names, lowered = tree.names
    if any(character in wanted for character in "*?["):
        matches = re.compile(translate(wanted)).match
        before = "." if wanted.startswith("*.") else ""  # as in rules, `*.` also matches names at the top level
        return [name for name, low in zip(names, lowered, strict=True) if matches(before + low)]
    return [name for name, low in zip(names, lowered, strict=True) if wanted in low]


def ordered(experiment: Experiment, groups: list[Members], order: str) -> list[Members]:
    """Return the children of a node in one of `ORDERS`. A fold is placed by the sum of its bytes or by its worst drift."""
    if order == "bytes":
        return sorted(groups, key=lambda group: -experiment.totals.of(group).total_bytes)
    if order == "drift":
        return sorted(groups, key=lambda group: _drift_key(worst_drift(experiment.results.modules, group)))
    return groups


def worst_drift(drift: Mapping[str, ModuleDrift], modules: Iterable[Module]) -> ModuleDrift | None:
    """Return the drift of the module that drifts most, or None if none is measured. A module without an output of its own, such as
    a list of layers, has the drift of its worst child. drift: by module name.
    """
    if not drift:
        return None
    each = (drift.get(module.name) or worst_drift(drift, _children(drift, module)) for module in modules)
    return min((one for one in each if one is not None), key=_drift_key, default=None)


def _children(drift: Mapping[str, ModuleDrift], module: Module) -> Iterator[Module]:
    """Yield the children of a module that have a drift, and those that are lists."""
    return (child for child in module.children.values() if child.name in drift or child.class_name in _LISTS)


def _drift_key(drift: ModuleDrift | None) -> tuple[float, float]:
    """Return a sort key that puts the worst modules first, and modules without a measurement last, behind exact ones."""
    if drift is None:
        return (1.0, math.inf)
    return (-float(drift.nonfinite + drift.nonfinite_reference), math.inf if drift.sqnr_db is None else drift.sqnr_db)
