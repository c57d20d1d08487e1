"""The window with the pictures that the reference and the candidate make of an input, side by side."""

from __future__ import annotations

from typing import ClassVar

from rich.color import Color
from rich.console import Group
from rich.style import Style
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.widgets import Static

from dtype_engine.results.drift import DriftReport
from dtype_engine.results.figures import psnr_and_ssim
from dtype_engine.results.pictures import Picture
from dtype_tui.rendering.plain_table import PlainTable
from dtype_tui.screens.modal import ModalScreen
from dtype_tui.state.experiment import Experiment

_GAP = 2
"""Number of blank cells between the two pictures."""
_WORDS = 3
"""Number of lines above the pictures."""


class PicturesScreen(ModalScreen[None]):
    """Shows the pictures of the last complete measurement. experiment: its results must have pictures."""

    DEFAULT_CSS = """
    PicturesScreen { align: center middle; }
    PicturesScreen > Vertical { width: 96%; height: 96%; border: round $accent; padding: 0 1; background: $surface; }
    PicturesScreen Static { height: 1fr; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter,g", "leave", "Close"),
        Binding("right,l,down,j", "move(1)", "Next input"),
        Binding("left,h,up,k", "move(-1)", "Previous input"),
    ]

    def __init__(self, experiment: Experiment) -> None:
        super().__init__()
        self._experiment = experiment
        self._shown: DriftReport | None = None
        self._index = 0

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "Pictures of reference and candidate"
            box.border_subtitle = "← → other inputs  Esc closes"
            yield Static(markup=False)

    def on_resize(self) -> None:
        self.call_after_refresh(self._draw)

    def show_figures(self) -> None:
        if self._experiment.results.report is not self._shown:
            self._draw()

    def action_move(self, step: int) -> None:
        self._index += step
        self._draw()

    def _draw(self) -> None:
        report = self._experiment.results.report or self._shown
        if report is None or not report.pictures:
            return
        self._shown = report
        self._index %= len(report.pictures)
        pair, place = report.pictures[self._index], self.query_one(Static)
        width, height = (place.size.width - _GAP) // 2, place.size.height - _WORDS
        grid = PlainTable.grid(padding=(0, _GAP, 0, 0))
        grid.add_row(Text("reference", "bold"), Text("candidate", "bold"))
        grid.add_row(*(half_blocks(each, max(1, width), max(1, height)) for each in (pair.reference, pair.candidate)))
        kept, total = len(report.pictures), report.sequences.total
        words = f"input {self._index + 1} of {kept if kept == total else f'the first {kept} of {total}'}"
        if similarity := psnr_and_ssim(report.output):
            words += f"   all: {similarity}"
        place.update(Group(Text(words, "dim"), Text(), grid))


def half_blocks(picture: Picture, columns: int, lines: int) -> Text:
    """Return a picture as text, as large as fits into `columns` x `lines` cells without distortion. Each cell shows two pixels, one
    above the other.
    """
    from PIL import Image  # imported here, because few models make pictures

    share = min(columns / picture.width, 2 * lines / picture.height)
    width, height = max(1, int(share * picture.width)), max(2, int(share * picture.height) // 2 * 2)
    whole = Image.frombytes("RGB", (picture.width, picture.height), picture.pixels)
    pixels = whole.resize((width, height), Image.Resampling.BOX).tobytes()
    colours = [Color.from_rgb(*pixels[at : at + 3]) for at in range(0, len(pixels), 3)]
    text = Text(no_wrap=True)
    for row in range(0, height, 2):
        upper, lower = (colours[each * width : (each + 1) * width] for each in (row, row + 1))
        for one, other in zip(upper, lower, strict=True):
            text.append("▀", Style(color=one, bgcolor=other))
        text.append("\n")
    return text
