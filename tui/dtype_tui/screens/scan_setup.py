"""Which dtypes to scan."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Static

from dtype_engine.core import dtypes
from dtype_tui.rendering.cells import colour
from dtype_tui.screens.modal import ModalScreen

SCANNED = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "int8@tensor")


PRESET = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8")


class ScanSetup(ModalScreen[tuple[str, ...] | None]):
    """Which dtypes to scan; the result is these, or None when left."""

    DEFAULT_CSS = """
    ScanSetup { align: center middle; }
    ScanSetup > VerticalScroll { width: 90%; max-width: 72; height: auto; max-height: 90%; border: round $accent; padding: 0 1;
        background: $surface; }
    ScanSetup Static { height: auto; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Dtype above"),
        Binding("down,j", "move(1)", "Dtype below"),
        Binding("space", "choose", "Scan in it, or not"),
        Binding("enter", "start", "Scan"),
        Binding("escape,q", "leave", "Leave"),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._at = 0
        self._chosen = set(PRESET)

    def compose(self) -> ComposeResult:
        with VerticalScroll(can_focus=False) as box:
            box.border_title = "Scan: how much does every weight matter?"
            box.border_subtitle = "↑↓ Space choose  Enter scans  Esc leaves"
            yield Static(markup=False)

    def on_mount(self) -> None:
        self._draw()

    def _draw(self) -> None:
        text = Text("Every weight in each of these dtypes, estimated from a few backward passes:\n", style="dim")
        for place, dtype in enumerate(SCANNED):
            here = place == self._at
            text.append("\n› " if here else "\n  ", style="bold")
            text.append("[x] " if dtype in self._chosen else "[ ] ", style="bold")
            text.append(f"{dtypes.badge(dtype):<9}", style=f"bold {colour(dtype)}")
            text.append(dtype, style="bold" if here else "dim")
        text.append("\n\nIt takes the time of about 20 forward passes; Esc stops it, s goes on.", style="dim")
        self.query_one(Static).update(text)

    def action_move(self, step: int) -> None:
        self._at = (self._at + step) % len(SCANNED)
        self._draw()

    def action_choose(self) -> None:
        self._chosen ^= {SCANNED[self._at]}
        self._draw()

    def action_start(self) -> None:
        if self._chosen:
            self.dismiss(tuple(dtype for dtype in SCANNED if dtype in self._chosen))

    def action_leave(self) -> None:
        self.dismiss(None)
