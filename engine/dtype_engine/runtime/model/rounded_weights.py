"""Keeps what roundings have chosen for weights, so that undoing a cast and casting again takes no further calibration runs."""

from __future__ import annotations

from collections import OrderedDict

from dtype_engine.runtime.numerics.roundings import RoundedCodes


class RoundedWeights:
    """The codes of weights in dtypes with roundings. What was used last is kept, up to a number of bytes."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str, tuple[str, ...]], RoundedCodes] = OrderedDict()
        self._nbytes = 0

    def get(self, weight: str, dtype: str, shares: tuple[str, ...]) -> RoundedCodes | None:
        """Return the codes of a weight in `dtype`, or None. shares: the names of the weights that share its tensor scale."""
        key = weight, dtype, shares
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def keep(self, weight: str, dtype: str, shares: tuple[str, ...], made: RoundedCodes, budget: int) -> None:
        """Keep the codes of a weight. budget: the number of bytes beyond which the codes that were not used for the longest time
        are dropped.
        """
        self._kept[weight, dtype, shares] = made
        self._nbytes += made.nbytes
        while self._nbytes > budget and len(self._kept) > 1:
            self._nbytes -= self._kept.popitem(last=False)[1].nbytes
