"""Groups of the positions of an output, one row for each way to form them: they show where a drift comes from.

A mean over all positions hides where it is large. Most of a mean KL usually comes from positions where the reference itself is
undecided, and errors that add up along a sequence show only at late positions. The groups depend on the reference and on the inputs
alone, never on the recipe, so those of two recipes can be compared one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import msgspec

from dtype_engine.core.errors import UserError
from dtype_engine.core.number_ranges import Count
from dtype_engine.core.text import printable

_DOUBLINGS = 40
"""The last group of positions ends at 2 to this power, far beyond any sequence."""


@dataclass(frozen=True, slots=True)
class PositionGroup:
    """The drift at some positions of the main output."""

    positions: Count
    """How many positions the group has: at least one."""
    kl_mean: float
    """The mean of KL(p ‖ q) over these positions, in nats."""
    kl_mean_se: float | None
    """Its standard error s / √n in nats, or None for one position."""
    kl_share: float | None
    """Their part (0 to 1) of the sum of the KL over all positions, or None if this sum is 0."""
    top1_agreement: float
    """The share of these positions (0 to 1) at which the candidate and the reference have the same most likely class."""


Groups = Mapping[str, Mapping[str, PositionGroup]]
"""The groups that have positions, by the name of the grouping and the name of the group: `["confidence"]["0.95-1"]`."""


class Grouping(msgspec.Struct, frozen=True):
    """A way to form groups of positions. It is a row of the table `GROUPINGS`."""

    name: str
    """The key in JSON. `PositionFigures` has the value of each position by this name."""
    title: str
    """What the groups differ in, for headings."""
    what: str
    """A sentence that says what the groups are, for reports."""
    ranges: tuple[tuple[float, float], ...]
    """The lowest value of each group, ascending, and the end by which the group is named. A group has the values from its lowest to
    below the lowest one of the next group.
    """
    has_chart: bool = False
    """Whether reports draw the mean KL of the groups as columns."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the groups: `0.95-1`, `129-256`, or `1` if a group has one value."""
        return _names(self.ranges)

    def of(self, groups: Groups) -> dict[str, PositionGroup]:
        """Return the groups of this grouping in their order, by name. Empty if they were not measured."""
        found = groups.get(self.name, {})
        return {name: found[name] for name in self.names if name in found}


@cache
def _names(ranges: tuple[tuple[float, float], ...]) -> tuple[str, ...]:
    return tuple(f"{low}" if low == high else f"{low}-{high}" for low, high in ranges)


GROUPINGS = {row.name: row for row in (
    Grouping("confidence", "confidence of the reference",
             "Positions by the highest probability that the reference gives to a class there.",
             ((0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 0.95), (0.95, 1))),
    Grouping("position", "position in the sequence", "Positions by their place in the sequence, from 1 and without padding.",
             ((1, 1), *((2**power // 2 + 1, 2**power) for power in range(1, _DOUBLINGS + 1))), has_chart=True),
)}  # fmt: skip
"""All groupings, by name.

The confidence is the highest probability that the reference gives to a class. Positions count from 1, without padding. Their groups
double in size, because errors that add up show over orders of magnitude, and end at powers of two, as the lengths of inputs do.
"""
CONFIDENT = "confidence:0.95-1"
"""The group where the reference is sure."""
_SHORT = "confident"
"""Its short name for limits."""


def group_named(text: str) -> str:
    """Return the full name of a group, such as `confidence:0.95-1`, for this name or for `confident`. Raises UserError."""
    if text == _SHORT:
        return CONFIDENT
    grouping, _, group = text.partition(":")
    if grouping in GROUPINGS and group in GROUPINGS[grouping].names:
        return text
    of_confidence = ", ".join(f"confidence:{name}" for name in GROUPINGS["confidence"].names)
    first = ", ".join(f"position:{name}" for name in GROUPINGS["position"].names[:4])
    raise UserError(
        f"no group of positions is called {printable(repr(text), 60)}; there are confident, {of_confidence}, {first} and so on, "
        "up to each power of two"
    )


def limit_name(group: str) -> str:
    """Return the name of a group for limits: `confident` for `confidence:0.95-1`, otherwise the full name."""
    return _SHORT if group == CONFIDENT else group


def group_label(name: str) -> str:
    """Return the full name of a group for the screen: `confidence 0.95–1`."""
    return name.replace(":", " ").replace("-", "–")
