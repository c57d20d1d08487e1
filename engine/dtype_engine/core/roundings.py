"""Roundings: which of a format's values a weight gets.

A format says which values exist under a scale. The bare name of a format, such as `int4@g32`, takes the scale from the largest
|value| and the nearest value under it. A rounding, whose name follows a colon as in `int4@g32:gptq`, chooses otherwise, by what the
weight is multiplied with: statistics of the inputs of its layer over calibration inputs. It changes values, not tensors, so an
export has the same layout and the same bytes. `runtime/numerics/roundings.py` computes them.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Statistic = Literal["squares", "products"]
"""What a rounding needs of a layer's inputs x: the mean of x² for each channel, or the mean of x xᵀ, a matrix."""


class Rounding(msgspec.Struct, frozen=True):
    """One way to choose scales and values."""

    name: str
    short: str
    """The name in badges. Rules may have it, too."""
    needs: Statistic
    words: str
    """What it does, for the user."""


ROUNDINGS = {
    each.name: each
    for each in (
        Rounding("imatrix", "imat", "squares", "scales by the squared error, weighted by the inputs' mean squares"),
        Rounding("gptq", "gptq", "products", "each channel's error compensated in the channels that follow"),
    )
}
ROUNDED_FORMATS = (
    "float8_e4m3fn", "int8", "mxfp4", "nvfp4", "int4@g128", "int4@g32", "int4@g128a", "int8@g128",
)  # fmt: skip
"""The formats that take a rounding."""
FEWEST_TOKENS = 16
"""An expert that got fewer tokens keeps the nearest values: so few say little about the tokens that it will get."""
SCALE_FACTORS = tuple(step / 32 for step in range(16, 36))
"""The factors, which contain 1, by which a rounding may multiply the range of a block before its scale is computed: 0.5 to 1.09."""
POWER_FACTORS = (0.5, 1.0, 2.0)
"""The same for formats whose scales are powers of two."""


def scale_factors(scale_dtype: str) -> tuple[float, ...]:
    """Return the factors for a format whose scales have this dtype. `uint8` means E8M0, powers of two."""
    return POWER_FACTORS if scale_dtype in ("uint8", "float8_e8m0fnu") else SCALE_FACTORS
