"""Folds neighboring modules that are alike, such as the layers of a transformer, into one row of the tree. The name of the row is a
pattern that matches these modules, such as `model.layers.{2..9}`, and is used like the name of a node.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from dtype_engine.core.errors import PatternError
from dtype_engine.core.tree import Module, Tree
from dtype_engine.recipe import compile_pattern, generalisations
from dtype_engine.reports.alike import AlikeModules

if TYPE_CHECKING:
    from dtype_engine.results.drift import ModuleDrift

FEWEST = 4
"""Minimum number of modules that are folded into one row."""
NEAR_DB = 6.0
"""Maximum difference in dB between the SQNRs of modules in one row: a factor of two in the amplitude of the error."""
_INVISIBLE_DB = 80.0
"""An SQNR above this counts as equal to it, so that modules whose drift is invisible can share a row."""
_LONGEST_NAME = 2000
"""Maximum number of characters of a fold's name."""

Members = tuple[Module, ...]


class Folds:
    """The groups of alike neighbors that share a row of the tree under one plan. The children of a node are grouped only when the
    node is opened, because there can be thousands.

    planned, caches: the planned dtypes of tensors and formats of KV caches, by name. drift: the drift of modules, by name.
    """

    def __init__(
        self,
        tree: Tree,
        planned: Mapping[str, str],
        drift: Mapping[str, ModuleDrift],
        caches: Mapping[str, str] | None = None,
    ) -> None:
        self._tree = tree
        self._drift = drift
        self._alike = AlikeModules(tree, planned, caches)
        self._below: dict[str, list[Members]] = {}

    def below(self, parent: Module) -> list[Members]:
        """Return one tuple per row below a module, in order: the children that share the row, or a single child."""
        known = self._below.get(parent.name)
        if known is None:
            known = self._below[parent.name] = list(self._grouped(parent))
        return known

    def around(self, module: Module) -> Members | None:
        """Return the modules that are folded into one row with `module`, `module` included, or None if `module` is not folded."""
        parent = self._tree.modules[module.name.rpartition(".")[0]]
        folds = (members for members in self.below(parent) if len(members) > 1)
        return next((members for members in folds if any(each is module for each in members)), None)

    def _grouped(self, parent: Module) -> Iterator[Members]:
        children = list(parent.children.values())
        literal = not parent.name or generalisations(parent.name)[0] == parent.name  # no special pattern characters
        foldable = len(children) >= FEWEST and literal
        for alike in self._alike.runs(children) if foldable else ([child] for child in children):
            for run in self._near(alike):
                if len(run) >= FEWEST and len(fold_name(run)) <= _LONGEST_NAME:
                    yield tuple(run)
                else:
                    yield from ((module,) for module in run)

    def _near(self, modules: Iterable[Module]) -> Iterator[list[Module]]:
        """Yield runs of neighbors whose SQNRs differ by at most `NEAR_DB`. A module of unknown SQNR joins the current run."""
        run: list[Module] = []
        lowest, highest = math.inf, -math.inf
        for module in modules:
            value = _decibels(self._drift.get(module.name))
            if value is not None:
                lowest, highest = min(lowest, value), max(highest, value)
                if run and highest - lowest > NEAR_DB:
                    yield run
                    run, lowest, highest = [], value, value
            run.append(module)
        if run:
            yield run


def _decibels(drift: ModuleDrift | None) -> float | None:
    """Return a module's SQNR in dB, limited to 0 to `_INVISIBLE_DB`. It is -inf if the output is not finite, None if unknown."""
    if drift is None:
        return None
    if not drift.is_finite:
        return -math.inf
    return None if drift.sqnr_db is None else max(0.0, min(drift.sqnr_db, _INVISIBLE_DB))


def fold_name(members: Sequence[Module]) -> str:
    """Return the name of the row of these modules, such as `model.layers.{2..9}`, or `model.layers.{{2..4},7,9}` with gaps."""
    runs: list[list[str]] = []
    for label in (member.label for member in members):
        if runs and _follows(runs[-1][-1], label):
            runs[-1].append(label)
        else:
            runs.append([label])
    parts = [f"{{{run[0]}..{run[-1]}}}" if len(run) > 1 else run[0] for run in runs]
    parent, dot, _ = members[0].name.rpartition(".")
    return parent + dot + (parts[0] if len(parts) == 1 else f"{{{','.join(parts)}}}")


def _follows(one: str, other: str) -> bool:
    """Return whether `other` is the number after `one`, and neither has leading zeros, which ranges in patterns can't have."""
    if not (one.isascii() and other.isascii() and len(other) < 19):
        return False
    return other == str(int(one) + 1) and one == str(int(one))


def fold_members(tree: Tree, node: str) -> Members:
    """Return the modules in the row with this name, such as `model.layers.{2..9}`, or () if there is no such row."""
    parent = tree.modules.get(node.partition("{")[0].removesuffix("."))
    if "{" not in node or parent is None or node in tree.modules or tree.canonical(node) is not None:
        return ()
    try:
        matches = compile_pattern(node).matches
    except PatternError:  # `node` may be the cursor of a saved session, which can be any text
        return ()
    return tuple(child for child in parent.children.values() if matches(child.name))


def modules_at(tree: Tree, node: str) -> Members:
    """Return the module with this name, or the modules of the fold with this name. Returns () for a tensor or an unknown name."""
    module = tree.modules.get(node)
    return (module,) if module is not None else fold_members(tree, node)


def patterns_for(tree: Tree, node: str) -> list[str]:
    """Return patterns that match a module, a tensor or a fold, from the most specific to the most general."""
    modules = modules_at(tree, node)
    class_name = modules[0].class_name if modules else None
    if len(modules) < 2:
        return generalisations(node, class_name)
    return [node, *generalisations(modules[0].name, class_name)[1:]]


def node_label(tree: Tree, node: str) -> str:
    """Return the last part of a node's name, such as `mlp`, or the range of a fold, such as `2 … 9`."""
    members = fold_members(tree, node)
    return fold_label(members) if members else node.rpartition(".")[2]


def fold_label(members: Sequence[Module]) -> str:
    return f"{members[0].label} … {members[-1].label}"
