"""A figure that the program does not have, as one row of the table."""

from __future__ import annotations

from dtype_engine.results.figures import Figure

TOY = Figure(
    "mean_to_max", "mean/max", "{:.5f}".format, better="more", what="how even the error is", comment="from 0 to 1",
    compute=lambda output: output.mean_abs / output.max_abs,
)  # fmt: skip
