"""How many drafts of a checkpoint's own draft head (multi-token prediction, MTP) its model accepts."""

from __future__ import annotations

from dataclasses import dataclass

from dtype_engine.core.number_ranges import Amount, Count
from dtype_engine.core.units import plural


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftAcceptance:
    """The acceptance of the first draft layer: the mean of Σ min(p, q) over positions, from 0 to 1.

    p is the model's distribution of a token, and q that of the draft layer for the same token. `reference` is the head as stored on
    the reference, `candidate` the cast head on the candidate.
    """

    reference: Amount
    candidate: Amount
    reference_se: Amount | None
    """The standard error of `reference` over positions. None for a single position."""
    candidate_se: Amount | None
    positions: Count

    @property
    def short(self) -> str:
        """The values as text: `61.2 ± 1.3 % → 60.8 ± 1.3 %`."""
        return f"{_share(self.reference, self.reference_se)} → {_share(self.candidate, self.candidate_se)}"

    @property
    def what(self) -> str:
        """What the values are of: `first draft layer, 297 positions`."""
        return f"first draft layer, {plural(self.positions, 'position')}"

    def __str__(self) -> str:
        return f"acceptance {self.short}; {self.what}"


def _share(value: float, error: float | None) -> str:
    return f"{100 * value:.2f}{'' if error is None else f' ± {100 * error:.2g}'} %"
