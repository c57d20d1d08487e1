"""Formats numbers for the panes."""

from __future__ import annotations

from rich.text import Text

from dtype_tui.rendering.palette import ramp

WORSE, BETTER = "▲", "▼"


def scientific(value: float, digits: int = 2) -> str:
    """Return a number in scientific notation with an exponent as short as possible, such as `2.26e-5`."""
    mantissa, _, exponent = f"{value:.{digits}e}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


def change(before: str | None, now: str, worsened: bool) -> Text:
    """Return a figure beside its earlier value, and a mark for worse or better: `2.20e-5 → 2.61e-5 ▲`.

    before: the earlier figure. If it is None or the same as `now`, only `now` is returned. worsened: whether the drift has grown.
    """
    if before is None or before == now:
        return Text(now, "bold")
    mark, colour = (WORSE, ramp("broken")) if worsened else (BETTER, ramp("exact"))
    return Text.assemble((f"{before} → ", "dim"), (now, "bold"), (f" {mark}", colour))
