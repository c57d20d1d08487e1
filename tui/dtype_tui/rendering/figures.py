"""Formats numbers for the panes."""

from __future__ import annotations

from rich.text import Text

from dtype_tui.rendering.palette import ramp

WORSE, BETTER = "▲", "▼"


def change(before: str | None, now: str, worsened: bool) -> Text:
    """Return a figure beside its earlier value, and a mark for worse or better: `2.20e-5 → 2.61e-5 ▲`.

    before: the earlier figure. If it is None or the same as `now`, only `now` is returned. worsened: whether the drift has grown.
    """
    if before is None or before == now:
        return Text(now, "bold")
    mark, colour = (WORSE, ramp("broken")) if worsened else (BETTER, ramp("exact"))
    return Text.assemble((f"{before} → ", "dim"), (now, "bold"), (f" {mark}", colour))
