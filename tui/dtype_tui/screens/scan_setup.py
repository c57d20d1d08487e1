"""The window in which the user chooses the dtypes of a scan, by the program that is to load the model."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType

from dtype_engine.core import dtypes
from dtype_engine.core.roundings import ROUNDINGS
from dtype_engine.recipe.loading import LOADERS
from dtype_engine.search.families import FAMILIES
from dtype_tui.rendering.palette import colour
from dtype_tui.screens.choice import ChoiceScreen
from dtype_tui.state.experiment import Experiment

SCANNED = (
    "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "int8@tensor", "mxfp8", "mxfp4", "nvfp4", "int4@g128",
)  # fmt: skip
OF_CACHES = ("kv:float8_e4m3fn", "kv:int8@token", "kv:int4@token")
"""Formats of KV caches, offered if rules can give the model's caches a format."""


class ScanSetup(ChoiceScreen[tuple[str, ...]]):
    """The window in which the user chooses the dtypes of a scan. Its result is the tuple of these dtypes."""

    HEADING = "Scan: how much does every weight matter?"
    KEYS = "↑↓ Space choose  ←→ loads in  Enter scans  Esc closes"
    DEFAULT_CSS = "ScanSetup > VerticalScroll { width: 90%; max-width: 72; }"

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Dtype above"),
        Binding("down,j", "move(1)", "Dtype below"),
        Binding("space", "choose", "Mark or unmark the dtype; in the last line, choose the rounding"),
        Binding("left,h", "loader(-1)", "Dtypes that the previous program loads"),
        Binding("right,l", "loader(1)", "Dtypes that the next program loads"),
        Binding("enter", "start", "Scan in the marked dtypes"),
        Binding("escape,q", "leave", "Leave"),
    ]

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self._loader = experiment.scan.limits.constraints.formats or experiment.model.loader
        self._walked = False
        """Whether the user chose the program. Before the model is loaded, what loads it is not known."""
        self._rounding = ""
        """The rounding of the marked formats that take it, a key of `ROUNDINGS`, or "" for the nearest values."""
        super().__init__(len(self._offered) + 1)
        self._chosen = set(FAMILIES[self._loader].dtypes)

    @property
    def _offered(self) -> tuple[str, ...]:
        """The dtypes to choose from: those that the program loads, or the usual ones if it loads others, too."""
        family = FAMILIES[self._loader]
        weights = (*family.dtypes, *family.more) if family.only_these else SCANNED
        return (*weights, *OF_CACHES) if self._experiment.tree.kv_cache.of_tokens else weights

    def draw(self) -> Text:
        text = Text("to be loaded by ", style="dim")
        text.append(f"‹ {LOADERS[self._loader]} ›", style="bold not dim")
        text.append("\nEvery weight is scored in each marked dtype by backward passes:\n")
        for index, dtype in enumerate(self._offered):
            text.append("\n")
            text.append(*self.marker(index))
            text.append("[x] " if dtype in self._chosen else "[ ] ", style="bold")
            text.append(f"{dtypes.short_name(dtype):<14}", style=f"bold {colour(dtype)}")
            text.append(dtype, style="bold" if index == self.index else "dim")
        index = len(self._offered)
        text.append("\n")
        text.append(*self.marker(index))
        text.append(f"{'rounded':<18}", style="bold")
        words = f"by {self._rounding}, where a format takes it" if self._rounding else "to the nearest values"
        text.append(words, style="bold" if index == self.index else "dim")
        if self._experiment.tree.kv_cache.of_tokens:
            text.append("\n\nkv: scores KV caches; o then adds their bytes at the set context.", style="dim")
        blank = "" if self._experiment.tree.kv_cache.of_tokens else "\n"
        text.append(f"{blank}\nIt takes the time of about 20 forward passes; Esc stops it, s resumes it.", style="dim")
        return text

    def action_loader(self, step: int) -> None:
        names = self._experiment.loaders
        if len(names) < 2:
            return
        self._walked = True
        at = names.index(self._loader) if self._loader in names else 0
        self._loader = names[(at + step) % len(names)]
        self._chosen = set(FAMILIES[self._loader].dtypes)
        self._count, self.index = len(self._offered) + 1, 0
        self.redraw()

    def action_choose(self) -> None:
        if self.index < len(self._offered):
            self._chosen ^= {self._offered[self.index]}
        else:
            roundings = ("", *ROUNDINGS)
            self._rounding = roundings[(roundings.index(self._rounding) + 1) % len(roundings)]
        self.redraw()

    def action_start(self) -> None:
        marked = (dtype for dtype in self._offered if dtype in self._chosen)
        chosen = tuple(dtypes.rounded(dtype, self._rounding) or dtype for dtype in marked)
        if chosen:
            scan = self._experiment.scan
            if self._walked and self._loader != (scan.limits.constraints.formats or self._experiment.model.loader):
                scan.limits = scan.limits.with_line(f"formats {self._loader}", self._experiment.tree.stored_bytes)
            self.dismiss(chosen)
