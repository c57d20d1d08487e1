"""Says what a search could reach otherwise: in another program, with no more bytes, or with a format that was not scanned."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator, Mapping

from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.core.tree import Tree
from dtype_engine.recipe.loading import OWN
from dtype_engine.search.families import FAMILIES
from dtype_engine.search.pareto import Constraints, ParetoFront, make_front

_WORTH = 0.01
"""The least share of the bytes that another program must save to be named."""
_FAR_LESS = 0.5
"""The largest share of a recipe's drift that counts as far less."""


def other_fronts(
    tree: Tree, scores: Mapping[tuple[str, str], float], constraints: Constraints
) -> dict[str, ParetoFront]:
    """Return the Pareto front for each program other than that of `constraints`, by its name in `FAMILIES`. A program that can't
    meet the constraints is left out.
    """
    fronts = {}
    for name in FAMILIES:
        if name == (constraints.formats or OWN):
            continue
        try:
            fronts[name] = make_front(tree, scores, dataclasses.replace(constraints, formats=name))
        except UserError:
            continue
    return fronts


def most_saved(fronts: Mapping[str, ParetoFront], size: int, drift: float) -> tuple[str, int] | None:
    """Return the program whose front saves most bytes over a recipe of `size` bytes at no more predicted drift, and these bytes.
    Returns None if none saves 1 % or more.
    """
    best: tuple[str, int] | None = None
    for name, front in fronts.items():
        at = bisect.bisect_left(front.points, True, key=lambda point: point.predicted <= drift)
        saved = size - front.size_of(front.points[at]) if at < len(front.points) else 0
        if saved >= max(1.0, _WORTH * size) and (best is None or saved > best[1]):
            best = name, saved
    return best


def far_better(front: ParetoFront, size: int, drift: float) -> int | None:
    """Return the index of the point with the least drift among those of at most `size` bytes, if its predicted drift is at most
    half of `drift`. Otherwise, return None.
    """
    at = bisect.bisect_right(front.points, size, key=front.size_of) - 1
    return at if at >= 0 and front.points[at].predicted <= _FAR_LESS * drift else None


def main_change(tree: Tree, before: Mapping[str, str], after: Mapping[str, str]) -> tuple[str, str] | None:
    """Return (dtype before, dtype after) of the change that concerns most elements, or None if nothing changes. before, after: the
    dtypes of weights by name.
    """
    elements: dict[tuple[str, str], int] = {}
    for name, dtype in after.items():
        if name in tree.tensors and before.get(name, dtype) != dtype:
            change = before[name], dtype
            elements[change] = elements.get(change, 0) + tree.tensors[name].numel
    return max(elements, key=elements.__getitem__, default=None)


def format_that_fits(
    tree: Tree, scores: Mapping[tuple[str, str], float], constraints: Constraints, budget: int
) -> str | None:
    """Return the widest format that was not scanned, and in which the weights would fit in `budget` bytes together with the scanned
    ones. Returns None if there is none. The formats are those of the program of `constraints` and those that checkpoints hold.
    """
    scanned = {dtypes.unrounded(dtype) for _, dtype in scores}
    for dtype in _by_width(constraints.formats or OWN):
        if dtype in scanned or (constraints.dtypes and dtype not in constraints.dtypes):
            continue
        # A drift of zero, so that the smallest point has the new format wherever it makes a weight smaller.
        added = {(name, dtype): 0.0 for name in tree.searched}
        try:
            front = make_front(tree, {**scores, **added}, constraints)
        except UserError:
            continue
        if front.size_of(front.points[0]) <= budget:
            return dtype
    return None


def _by_width(family: str) -> Iterator[str]:
    """Yield the formats that an export for a program may have, from the widest to the narrowest."""
    offered = FAMILIES[family].dtypes if FAMILIES[family].only_these else (*FAMILIES[family].dtypes, *_STORED_FORMATS)
    yield from sorted(dict.fromkeys(offered), key=lambda dtype: -dtypes.BY_NAME[dtype].bits)


_STORED_FORMATS = ("int8@g128", "fp8@128x128", "int4@g128", "mxfp4", "nvfp4")
"""Formats with scales for each block that other programs read."""
