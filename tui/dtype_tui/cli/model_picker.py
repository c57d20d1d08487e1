"""The screen that opens if the command line names no model. It offers local, cached and recent models, and the demo."""

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
from dtype_engine.core.units import plural
from dtype_engine.core.user_folders import expanded
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
    origin: str
    """Where the model comes from, such as "opened recently"."""
    nbytes: int | None = None
    modified: float | None = None
    """When the model was last written or opened, in seconds since 1970."""


DEMO = Offer("demo", "built in, 708 k parameters")


class ModelPicker(BaseApp[str]):
    """Lets the user choose a model from a list, or type its name. `run` returns the name, or None if the user quits."""

    TITLE = "dtype-tui"
    CSS = """
    #title { padding: 1 2 0 2; }
    #typed { margin: 1 1 0 1; }
    #says { padding: 0 2; height: 1; }
    #offers { margin: 0 1; height: 1fr; border: none; background: $background; scrollbar-size-vertical: 1; }
    #keys { height: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,tab", "move('cursor_down')", "Down", priority=True),
        Binding("up,shift+tab", "move('cursor_up')", "Up", priority=True),
        Binding("pagedown", "move('page_down')", "A page down", show=False, priority=True),
        Binding("pageup", "move('page_up')", "A page up", show=False, priority=True),
        Binding("escape", "leave", "Clear the line, then quit", priority=True),
        Binding("ctrl+q", "quit", "Quit", priority=True),
    ]

    def __init__(self, offers: Sequence[Offer], check: Callable[[str], object], config: Config | None = None) -> None:
        """offers: the models to list. check: called with the chosen name; raises UserError if there is no such model."""
        super().__init__(config or Config())
        self.offers = list(offers[:MOST_SHOWN])
        self._check = check
        self._shown: list[Offer] = []

    def compose(self) -> ComposeResult:
        title = Text.assemble(("dtype-tui", "bold"), "  what happens if these layers are in another dtype?")
        yield Static(title, id="title")
        yield LineInput("typed", self._enter, self._filter, "a folder, a file, a Hugging Face id, file.py:Name, demo")
        yield Static(id="says", markup=False)
        offers = OptionList(id="offers")
        offers.can_focus = False  # the line keeps the focus, so that all letters go there
        yield offers
        yield Static(Text(" type to filter, or a path  ↑↓ choose  Enter opens  Esc quits", style="dim"), id="keys")

    def on_mount(self) -> None:
        self.screen.set_focus(self.query_one(LineInput))
        self._fill()
        self.call_after_refresh(resume_gc)

    def on_resize(self) -> None:
        self.call_after_refresh(self._fill)

    def _filter(self, text: str) -> None:
        if self.query(OptionList):
            self.query_one("#says", Static).update("")
            self._fill(keep_cursor=False)

    def _fill(self, keep_cursor: bool = True) -> None:
        options, typed = self.query_one(OptionList), self.query_one(LineInput).value.strip()
        at = options.highlighted or 0 if keep_cursor else 0
        self._shown = [offer for offer in self.offers if typed.lower() in offer.model.lower()]
        if typed and self._shown and all(offer.model != typed for offer in self._shown) and _is_path(typed):
            self._shown.insert(0, Offer(typed, "as typed"))  # a path that is the beginning of others can be opened, too
        width = max(40, self.size.width - 6)
        options.clear_options()
        origin_width = max((len(offer.origin) for offer in self.offers), default=0)
        options.add_options(
            [Option(offer_line(offer, width, origin_width), id=str(index)) for index, offer in enumerate(self._shown)]
        )
        options.highlighted = min(at, len(self._shown) - 1) if self._shown else None

    def action_move(self, action: str) -> None:
        getattr(self.query_one(OptionList), f"action_{action}")()

    def action_leave(self) -> None:
        typed = self.query_one(LineInput)
        if typed.value:
            typed.put("")
        else:
            self.exit()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self._open(self._shown[int(event.option.id or 0)].model)

    def _enter(self, line: str) -> None:
        highlighted = self.query_one(OptionList).highlighted
        if highlighted is not None:
            self._open(self._shown[highlighted].model)
        elif line.strip():
            self._open(line.strip())

    def _open(self, model: str) -> None:
        try:
            self._check(model)
        except UserError as error:
            self.query_one("#says", Static).update(Text(str(error), style="bold", no_wrap=True, overflow="ellipsis"))
        else:
            self.exit(model)


def _is_path(text: str) -> bool:
    try:
        return expanded(text).exists()
    except (OSError, ValueError):  # too long a name, a zero byte
        return False


def offer_line(offer: Offer, width: int, origin_width: int = 0) -> Text:
    """Return a line of `width` cells with a model's name, size and age and, if there is room, its origin. origin_width: the cells
    to reserve for the origin, the same in all lines.
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
            return f"{plural(int(seconds // length), unit)} ago"
    return "just now"
