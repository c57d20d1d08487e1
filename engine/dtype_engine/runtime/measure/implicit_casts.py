"""Where dtypes silently change: the implicit casts of one forward pass, summed."""

from __future__ import annotations

from collections.abc import Iterable

from dtype_engine.results.drift import ImplicitCastStats
from dtype_engine.runtime.modes.mixed import ImplicitCast


def aggregate(casts: Iterable[ImplicitCast]) -> tuple[ImplicitCastStats, ...]:
    """Casts alike in module, operation and dtypes as one; those to float64 first, then by elements, the most first.

    A float64 input or weight silently widens everything that follows, which is rarely meant.
    """
    sums: dict[tuple[str, str, str, str, bool], tuple[int, int]] = {}
    for cast in casts:
        key = (cast.module, cast.operation, cast.source, cast.target, cast.torch_raises)
        elements, count = sums.get(key, (0, 0))
        sums[key] = (elements + cast.elements, count + 1)
    rows = [
        ImplicitCastStats(module, operation, source, target, elements, count, raises)
        for (module, operation, source, target, raises), (elements, count) in sums.items()
    ]
    return tuple(sorted(rows, key=lambda row: (row.target != "float64", -row.elements, row.module)))
