"""The screen that opens if the command line names no model. It offers local, cached and recently opened models, and the demo."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from dtype_engine.core.errors import UserError
from dtype_engine.core.text import printable
from dtype_tui.base_app import BaseApp
from dtype_tui.config.config import Config
from dtype_tui.process.gc_policy import resume_gc
from dtype_tui.rendering.cells import short_bytes, truncate
from dtype_tui.widgets.line_input import LineInput

MOST_SHOWN = 500
MOST_RECENT = 5


@dataclass(frozen=True)
class Offer:
    """A model that the user can choose."""

    model: str
    """The text that names this model as the command-line argument MODEL."""
    origin: str
    """A few words that say where the model comes from."""
    nbytes: int | None = None
    modified: float | None = None
    """The time in seconds since 1970 at which the model was last written or opened."""


DEMO = Offer("demo", "built in, 708 k parameters")


class ModelPicker(BaseApp[str]):
    """An app in which the user chooses a model or types its name. `run` returns the name, or None if the user leaves."""

    TITLE = "dtype-tui"
    CSS = """
    #title { padding: 1 2 0 2; }
    #typed { margin: 1 1 0 1; }
    #says { padding: 0 2; height: 1; }
    #offers { margin: 0 1; height: 1fr; border: none; background: $background; scrollbar-size-vertical: 1; }
    #keys { height: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("tab", "other_half", "Switch between the list and the line", priority=True),
        Binding("escape,ctrl+q", "quit", "Quit", priority=True),
        Binding("q", "quit", "Quit"),
        Binding("j", "move('cursor_down')", "Down", show=False),
        Binding("k", "move('cursor_up')", "Up", show=False),
    ]

    def __init__(self, offers: Sequence[Offer], check: Callable[[str], object], config: Config | None = None) -> None:
        """offers: the models to list. check: a function that is called with the chosen or typed name, and raises UserError if there
        is no such model.
        """
        super().__init__(config or Config())
        self.offers = list(offers[:MOST_SHOWN])
        self._check = check

    def compose(self) -> ComposeResult:
        title = Text.assemble(("dtype-tui", "bold"), "  what happens if these layers are in another dtype?")
        yield Static(title, id="title")
        yield LineInput("typed", self._enter, placeholder="a folder, a file, a Hugging Face id, file.py:Name, demo")
        yield Static(id="says", markup=False)
        yield OptionList(id="offers")
        yield Static(Text(" ↑↓ choose  Enter opens  Tab types a path  q quits", style="dim"), id="keys")

    def on_mount(self) -> None:
        self.screen.set_focus(self.query_one(OptionList))
        self._fill()
        self.call_after_refresh(resume_gc)

    def on_resize(self) -> None:
        self.call_after_refresh(self._fill)

    def _fill(self) -> None:
        options = self.query_one(OptionList)
        at = options.highlighted or 0
        width = max(40, self.size.width - 6)
        options.clear_options()
        origin_width = max((len(offer.origin) for offer in self.offers), default=0)
        options.add_options(
            [Option(offer_line(offer, width, origin_width), id=str(index)) for index, offer in enumerate(self.offers)]
        )
        options.highlighted = min(at, len(self.offers) - 1)

    def action_other_half(self) -> None:
        typed = self.query_one(LineInput)
        self.screen.set_focus(self.query_one(OptionList) if self.focused is typed else typed)

    def action_move(self, action: str) -> None:
        getattr(self.query_one(OptionList), f"action_{action}")()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self._open(self.offers[int(event.option.id or 0)].model)

    def _enter(self, line: str) -> None:
        if line.strip():
            self._open(line.strip())

    def _open(self, model: str) -> None:
        try:
            self._check(model)
        except UserError as error:
            self.query_one("#says", Static).update(Text(str(error), style="bold", no_wrap=True, overflow="ellipsis"))
        else:
            self.exit(model)


def offer_line(offer: Offer, width: int, origin_width: int = 0) -> Text:
    """Return a line with a model's name, size, age and origin in `width` cells. The origin is left out if there is no room.

    origin_width: width in cells of the longest origin of all lines, which aligns the columns.
    """
    origin_width = max(origin_width, len(offer.origin))
    size = short_bytes(offer.nbytes) if offer.nbytes is not None else ""
    age = _age(time.time() - offer.modified) if offer.modified else ""
    origin = offer.origin if width >= 54 + origin_width else ""
    name_width = width - 12 - 16 - (origin_width + 2 if origin else 0)
    name = truncate(printable(offer.model, 500), max(12, name_width))
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f"{name:<{max(12, name_width)}}", style="bold")
    text.append(f"{size:>12}{age:>16}")
    if origin:
        text.append(f"  {origin}", style="dim")
    return text


def _age(seconds: float) -> str:
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {unit}{'s' if count != 1 else ''} ago"
    return "just now"
