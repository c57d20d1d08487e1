"""What the merge of an adapter loses where the merged weights are rounded to the dtype of the base model."""

from __future__ import annotations

from dataclasses import dataclass

from dtype_engine.core.number_ranges import Amount, Positive
from dtype_engine.core.text import printable
from dtype_engine.core.units import plural


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeError:
    """The rounding of merged weights to the dtypes of the base's weights, relative to what the adapter adds to the weights.

    For weights W of the base and merged weights M in float32, it is ‖round(M) - M‖ / ‖M - W‖.
    """

    dtypes: tuple[str, ...]
    """The dtypes to which the weights are rounded, such as "bfloat16"."""
    weights: Positive
    """The number of adapted weights that are rounded."""
    relative: Amount
    """The relative error of all these weights together: 0.05 means that 5 % of the adapter's change is lost."""
    worst: str
    """The name of the weight with the largest relative error."""
    worst_relative: Amount

    @property
    def short(self) -> str:
        """The error as text: `4.2 % of the adapter's change`."""
        return f"{_percent(self.relative)} of the adapter's change"

    @property
    def what(self) -> str:
        """What the error is of: `14 weights rounded to bfloat16, most in model.layers.1.mlp.up_proj.weight: 6.1 %`."""
        rounded = f"{plural(self.weights, 'weight')} rounded to {' and '.join(self.dtypes)}"
        return f"{rounded}, most in {printable(self.worst, 200)}: {_percent(self.worst_relative)}"

    def __str__(self) -> str:
        return f"error {self.short}; {self.what}"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 1 else f"{100 * share:.0f} %"
