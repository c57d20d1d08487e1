"""The window in which the user chooses the dtypes of a scan."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType

from dtype_engine.core import dtypes
from dtype_engine.search.families import FAMILIES, TRANSFORMERS
from dtype_tui.rendering.palette import colour
from dtype_tui.screens.choice import ChoiceScreen

SCANNED = (
    "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "int8@tensor", "mxfp8", "mxfp4", "nvfp4", "int4@g128",
)  # fmt: skip
OF_CACHES = ("kv:float8_e4m3fn", "kv:int8@token", "kv:int4@token")
"""Formats of KV caches, offered if rules can give the model's caches a format."""
PRESET = FAMILIES[TRANSFORMERS].dtypes


class ScanSetup(ChoiceScreen[tuple[str, ...]]):
    """The window in which the user chooses the dtypes of a scan. Its result is the tuple of these dtypes."""

    HEADING = "Scan: how much does every weight matter?"
    KEYS = "↑↓ Space choose  Enter scans  Esc closes"
    DEFAULT_CSS = "ScanSetup > VerticalScroll { width: 90%; max-width: 72; }"

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Dtype above"),
        Binding("down,j", "move(1)", "Dtype below"),
        Binding("space", "choose", "Mark or unmark the dtype"),
        Binding("enter", "start", "Scan in the marked dtypes"),
        Binding("escape,q", "leave", "Leave"),
    ]

    def __init__(self, has_caches: bool = False) -> None:
        self._offered = (*SCANNED, *OF_CACHES) if has_caches else SCANNED
        super().__init__(len(self._offered))
        self._chosen = set(PRESET)

    def draw(self) -> Text:
        text = Text("Scores every weight in each marked dtype, estimated from a few backward passes:\n", style="dim")
        for index, dtype in enumerate(self._offered):
            text.append("\n")
            text.append(*self.marker(index))
            text.append("[x] " if dtype in self._chosen else "[ ] ", style="bold")
            text.append(f"{dtypes.short_name(dtype):<14}", style=f"bold {colour(dtype)}")
            text.append(dtype, style="bold" if index == self.index else "dim")
        if self._offered != SCANNED:
            text.append(
                "\n\nkv: scores KV caches; o then adds their bytes at the set context.",
                style="dim",
            )
        text.append("\n\nIt takes the time of about 20 forward passes; Esc stops it, s resumes it.", style="dim")
        return text

    def action_choose(self) -> None:
        self._chosen ^= {self._offered[self.index]}
        self.redraw()

    def action_start(self) -> None:
        if self._chosen:
            self.dismiss(tuple(dtype for dtype in self._offered if dtype in self._chosen))
