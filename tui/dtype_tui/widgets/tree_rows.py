"""Which rows the module tree has, and in which order: those of open nodes, or those that a filter lets through."""

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
"""Of a node's children: as the model has them, the largest first, those that drift most first."""
MOST_MATCHES = 1000
"""Matches of a filter that are shown: nobody walks through more, and they come after every key."""


@dataclass(frozen=True, slots=True)
class Row:
    """A visible line: a module, or one tensor of it (`tensor` set; `alias` when it is tied to a tensor elsewhere)."""

    name: str
    depth: int
    module: Module
    tensor: TensorInfo | None = None

    @property
    def label(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def alias(self) -> bool:
        return self.tensor is not None and self.tensor.name != self.name


def first_opened(tree: Tree) -> set[str]:
    """Names of the nodes that are open at first: from the root down to the first with several children, and one level more."""
    node = tree.root
    opened = {""}
    while len(node.children) == 1 and not node.tensors:
        node = next(iter(node.children.values()))
        opened.add(node.name)
    if len(node.children) <= 12:
        opened |= {child.name for child in node.children.values() if 0 < len(child.children) <= 64}
    return opened


def open_rows(experiment: Experiment, opened: set[str], order: str) -> list[Row]:
    """The rows of open nodes, children in one of `ORDERS`."""
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
    """The rows of the nodes that match, and of their ancestors."""
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
    """Names that contain `text` or match it as a glob, ignoring case; none for an empty text."""
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


def _drift_key(reading: ModuleDrift | None) -> tuple[float, float]:
    """Sorts the worst first; what was not measured comes last."""
    if reading is None or reading.sqnr_db is None:
        return (0.0, math.inf)
    return (-float(reading.nonfinite), reading.sqnr_db)


def _tensor_rows(node: Module, depth: int) -> list[Row]:
    prefix = f"{node.name}." if node.name else ""
    return [Row(prefix + local, depth, node, tensor) for local, tensor in node.tensors.items()]
