"""The rows of the module tree and their order. The rows are those of open nodes or, with a filter, those of matching nodes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import translate
from typing import TYPE_CHECKING

from dtype_engine.core.tree import Module, TensorInfo, Tree

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
    """A visible line of the tree: a module, or one of its tensors."""

    name: str
    depth: int
    """Number of ancestors of the row's node."""
    module: Module
    """The module itself, or the module that holds `tensor`."""
    tensor: TensorInfo | None = None

    @property
    def label(self) -> str:
        return self.name.rpartition(".")[2]

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


def open_rows(experiment: Experiment, opened: set[str], order: str) -> list[Row]:
    """Return the rows of all nodes that are visible because every node above them is open. opened: the names of the open nodes.
    order: one of `ORDERS`.
    """
    rows: list[Row] = []
    stack: list[tuple[Module, int]] = [(experiment.tree.root, 0)]
    while stack:
        node, depth = stack.pop()
        rows.append(Row(node.name, depth, node))
        if node.name in opened:
            rows.extend(_tensor_rows(node, depth + 1))
            stack.extend((child, depth + 1) for child in reversed(_ordered(experiment, node, order)))
    return rows


def filtered_rows(tree: Tree, matches: Iterable[str]) -> list[Row]:
    """Return the rows of the nodes that match the filter, and of all nodes above them."""
    shown: set[str] = {""}
    for name in matches:
        while name not in shown:
            shown.add(name)
            name = name.rpartition(".")[0]
    rows: list[Row] = []
    stack: list[tuple[Module, int]] = [(tree.root, 0)]
    while stack:
        node, depth = stack.pop()
        rows.append(Row(node.name, depth, node))
        rows.extend(row for row in _tensor_rows(node, depth + 1) if row.name in shown)
        stack.extend((child, depth + 1) for child in reversed(node.children.values()) if child.name in shown)
    return rows


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


def _ordered(experiment: Experiment, node: Module, order: str) -> list[Module]:
    children = list(node.children.values())
    if order == "bytes":
        children.sort(key=lambda child: -experiment.totals[child.name].total_bytes)
    elif order == "drift":
        children.sort(key=lambda child: _drift_key(experiment.results.modules.get(child.name)))
    return children


def _drift_key(drift: ModuleDrift | None) -> tuple[float, float]:
    """Return a sort key that puts the worst modules first and modules without a measurement last."""
    if drift is None or drift.sqnr_db is None:
        return (0.0, math.inf)
    return (-float(drift.nonfinite), drift.sqnr_db)


def _tensor_rows(node: Module, depth: int) -> list[Row]:
    prefix = f"{node.name}." if node.name else ""
    return [Row(prefix + local, depth, node, tensor) for local, tensor in node.tensors.items()]
