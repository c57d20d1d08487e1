"""The help: the main screen's keys by task, then the keys of every window, then explanations of terms."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import zip_longest
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.widgets import Static

from dtype_engine.core import dtypes
from dtype_engine.core.text import printable
from dtype_tui.config.bindings import DIGITS, FRONT_KEYS, KEYS
from dtype_tui.config.key_groups import GROUPS
from dtype_tui.config.key_names import described, keys_of, on_keyboard
from dtype_tui.rendering.columns import in_columns
from dtype_tui.screens.causes import CausesScreen
from dtype_tui.screens.generation import GenerationScreen
from dtype_tui.screens.history import MeasurementsScreen
from dtype_tui.screens.inputs import InputsScreen
from dtype_tui.screens.jobs import JobsScreen
from dtype_tui.screens.jump import JumpScreen
from dtype_tui.screens.modal import ModalScreen
from dtype_tui.screens.overlay import Overlay
from dtype_tui.screens.pictures import PicturesScreen
from dtype_tui.screens.presets import PresetsScreen
from dtype_tui.screens.save import SaveScreen
from dtype_tui.screens.scan import ScanScreen
from dtype_tui.screens.scan_setup import ScanSetup
from dtype_tui.screens.settings import SettingsScreen
from dtype_tui.screens.weight_values import WeightScreen
from dtype_tui.state.experiment import Experiment
from dtype_tui.state.node_rules import rules_within
from dtype_tui.widgets.command_line import CommandLine
from dtype_tui.widgets.line_input import LineInput
from dtype_tui.widgets.module_tree import ModuleTree
from dtype_tui.widgets.panes.base import Pane
from dtype_tui.widgets.panes.recipe import RecipePane
from dtype_tui.widgets.prompts import CastPrompt, FilterPrompt
from dtype_tui.widgets.tree_rows import Row

Section = tuple[str, list[tuple[str, str]]]
_NARROWEST = 35
_KEYS_WIDTH = 8
"""Width in cells of the column of the main screen's keys. Longer keys shift their description to the right."""
_WINDOWS_KEYS_WIDTH = 20
"""Width in cells of the column of keys of windows. They are listed below each other."""


class HelpScreen(ModalScreen[None]):
    """Shows keys and explanations. node: the name of the node under the cursor. node_keys: (binding id, description) of the node's
    keys. chosen: the user's own keys, by binding id. words: (title, text) of explanations. hidden: the ids of bindings to leave
    out. wanted: what to search for at first.
    """

    DEFAULT_CSS = """
    HelpScreen { align: center middle; }
    HelpScreen > Vertical { width: 100%; max-width: 124; height: 94%; border: round $accent; padding: 0 1; background: $surface; }
    HelpScreen VerticalScroll { height: 1fr; scrollbar-size-vertical: 1; }
    HelpScreen VerticalScroll > Static { height: auto; }
    HelpScreen Input { display: none; height: 1; }
    HelpScreen Input.open { display: block; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "Close the search, then the help", priority=True),
        Binding("q,enter,question_mark", "dismiss", "Close"),
        Binding("slash", "search", "Search the help"),
        Binding("j", "scroll(1)", "Down", show=False),
        Binding("k", "scroll(-1)", "Up", show=False),
    ]

    def __init__(
        self,
        node: str,
        node_keys: Sequence[tuple[str, str]],
        chosen: Mapping[str, str],
        words: Iterable[tuple[str, str]],
        hidden: Set[str] = frozenset(),
        wanted: str = "",
    ) -> None:
        super().__init__()
        self._wanted = wanted
        self._hidden = hidden
        self._node = node
        self._node_keys = node_keys
        self._chosen = chosen
        self._sections, self._words = sections(chosen, words, hidden)

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "Help"
            box.border_subtitle = "/ searches  PgDn windows, words  Esc closes"
            with VerticalScroll():
                yield Static(markup=False)
            yield LineInput("help-search", lambda _: self._close_search(), self._draw, "a key, or a word")

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()
        if self._wanted:
            self.action_search()
            self.query_one(LineInput).put(self._wanted)

    def on_resize(self) -> None:
        self.call_after_refresh(self._draw, self.query_one(LineInput).value)

    def _draw(self, wanted: str = "") -> None:
        if not self.is_mounted:
            return
        width = max(30, self.query_one(VerticalScroll).size.width - 1)
        page = search(self._searched(), self._words, wanted, width) if wanted.strip() else self._page(width)
        self.query_one("VerticalScroll > Static", Static).update(page)

    def _page(self, width: int) -> Text:
        page = Text()
        page.append_text(node_lines(self._node, self._node_keys, self._chosen, width))
        page.append("\n")
        page.append_text(in_columns(key_blocks(self._chosen, self._hidden), width, _NARROWEST))
        for title, rows in self._sections[2:]:
            page.append("\n\n")
            page.append_text(Text("\n").join(_block(title, rows, _WINDOWS_KEYS_WIDTH, width)))
        for title, text in self._words:
            page.append(f"\n\n{title}", style="bold")
            for line in textwrap.wrap(text, width):
                page.append(f"\n{line}")
        return page

    def _searched(self) -> list[Section]:
        """Return the sections that a search covers: the keys of the node under the cursor, of the page, and of all windows."""
        node = f"Here: {printable(self._node, 500)}"
        here = (node, [(_keys((name,), self._chosen), words) for name, words in self._node_keys])
        return [here, *_groups(self._chosen, self._hidden), *self._sections]

    def finds(self, wanted: str) -> bool:
        """Return whether the help contains a text."""
        return bool(_found(self._searched(), self._words, wanted.strip().lower(), sys.maxsize).plain)

    def action_search(self) -> None:
        field = self.query_one(LineInput)
        field.add_class("open")
        self.set_focus(field)

    def _close_search(self) -> None:
        """Hide the search line. The page still shows what was found."""
        self.query_one(LineInput).remove_class("open")
        self.query_one(VerticalScroll).focus()

    def action_leave(self) -> None:
        field = self.query_one(LineInput)
        if field.value or field.has_class("open"):
            field.put("")
            self._close_search()
        else:
            self.dismiss()


def sections(
    chosen: Mapping[str, str], words: Iterable[tuple[str, str]], hidden: Set[str] = frozenset()
) -> tuple[list[Section], list[tuple[str, str]]]:
    """Return two lists. The first has the sections of the help: the title of a screen or prompt, and its keys with descriptions,
    which begin in lower case. The second has explanations of terms: `words` and the texts of two windows. hidden: the ids of
    bindings to leave out. If there are any, the save window is left out, too.
    """
    places: tuple[tuple[str, Iterable[BindingType]], ...] = (
        ("Casting and measuring", KEYS),
        ("In the tree", ModuleTree.BINDINGS),
        ("At the labels", JumpScreen.BINDINGS),
        ("In a pane", Pane.BINDINGS),
        ("In the Recipe pane", RecipePane.BINDINGS),
        ("In the cast prompt", CastPrompt.BINDINGS),
        ("In the filter", FilterPrompt.BINDINGS),
        ("In the command line", CommandLine.BINDINGS),
        ("In the settings", SettingsScreen.BINDINGS),
        ("In the inputs", InputsScreen.BINDINGS),
        ("In the generated texts", GenerationScreen.BINDINGS),
        ("In the pictures", PicturesScreen.BINDINGS),
        ("In the dtypes to scan", ScanSetup.BINDINGS),
        ("In the scan", ScanScreen.BINDINGS),
        ("Along the front", FRONT_KEYS),
        ("In drift over depth", CausesScreen.BINDINGS),
        ("In the history", MeasurementsScreen.BINDINGS),
        ("In the presets", PresetsScreen.BINDINGS),
        ("In the save window", SaveScreen.BINDINGS),
        ("In the jobs", JobsScreen.BINDINGS),
        ("In the values of a tensor", WeightScreen.BINDINGS),
        ("In this help", HelpScreen.BINDINGS),
        ("In a box of text", Overlay.BINDINGS),
    )
    if hidden:
        places = tuple(
            (title, [each for each in bindings if not (isinstance(each, Binding) and each.id in hidden)])
            for title, bindings in places
            if bindings is not SaveScreen.BINDINGS
        )
    explained = [*words, ("Inputs", InputsScreen.HELP), ("Sensitivity", ScanScreen.HELP)]
    return [
        (title, [(keys, text[:1].lower() + text[1:]) for keys, text in described(bindings, chosen)])
        for title, bindings in places
    ], explained


def keys_for_node(experiment: Experiment, row: Row) -> list[tuple[str, str]]:
    """Return (binding id, description) of each key that applies to the node of a row."""
    found = [("details", "details"), ("cast", "cast by a pattern"), ("copy-name", "copy its name")]
    if row.tensor is not None:
        found.append(("values", "its values"))
    elif row.can_open:
        found.append(("open-or-close", "open or close"))
    if rules_within(experiment.tree, experiment.plan, row.name)[0]:
        found.append(("drop-rules", "drop its rules"))
    return found


def node_lines(node: str, node_keys: Sequence[tuple[str, str]], chosen: Mapping[str, str], width: int) -> Text:
    """Return the lines about the node under the cursor: its name, the keys for dtypes, and the node's other keys."""
    names = [dtypes.short_name(dtype) if dtype != dtypes.STORED else "as stored" for dtype in DIGITS]
    text = Text()
    text.append(f"Here: {printable(node, 500)}\n", style="bold")
    text.append("  ".join(f"{number} {name}" for number, name in enumerate(names, 1)) + "\n")
    line = ""
    for name, words in node_keys:
        pair = f"{_keys((name,), chosen)} {words}"
        if line and len(line) + 3 + len(pair) > width:
            text.append(f"{line}\n")
            line = ""
        line += f"   {pair}" if line else pair
    text.append(f"{line}\n")
    return text


def key_blocks(chosen: Mapping[str, str], hidden: Set[str] = frozenset()) -> list[list[Text]]:
    """Return the groups of keys, each as a heading and one line per entry."""
    return [_block(title, rows) for title, rows in _groups(chosen, hidden)]


def _groups(chosen: Mapping[str, str], hidden: Set[str]) -> list[Section]:
    return [
        (title, [(_keys(names, chosen), words) for words, names in entries if hidden.isdisjoint(names)])
        for title, entries in GROUPS.items()
    ]


def _block(
    title: str, rows: Iterable[tuple[str, str]], widest: int = _KEYS_WIDTH, width: int | None = None
) -> list[Text]:
    """Return the lines of a heading and of its rows (keys, description). widest: the maximum width in cells of the column of keys.
    width: the cells of a line, at which descriptions are wrapped. If it is None, they are not wrapped.
    """
    listed = list(rows)
    keys_width = min(widest, max(len(keys) for keys, _ in listed))
    lines = [Text(title, style="bold")]
    for keys, words in listed:
        lines += _row(f"{keys:<{keys_width}}  ", words, keys_width + 2, width or sys.maxsize)
    return lines


def _row(keys: str, words: str, column: int, width: int) -> list[Text]:
    """Return an entry of the help as lines: its keys and its description, which is wrapped and indented to `column`."""
    wrapped = textwrap.wrap(words, width, initial_indent=" " * len(keys), subsequent_indent=" " * column)
    first, *more = wrapped or [keys]
    return [Text.assemble(keys, (first[len(keys) :], "dim")), *(Text(line, style="dim") for line in more)]


def _keys(names: Sequence[str], chosen: Mapping[str, str]) -> str:
    """Return the keys of the bindings with these ids: the first key of each, then the second of each. Ctrl+r becomes `^r`."""
    bindings = [binding for binding in (*KEYS, *ModuleTree.BINDINGS) if isinstance(binding, Binding)]
    keys = [keys_of(binding, chosen).split(",") for name in names for binding in bindings if binding.id == name]
    ordered = [key for row in zip_longest(*keys) for key in row if key is not None]
    return " ".join(on_keyboard(key).replace("Ctrl+", "^").replace("Backspace", "Bksp") for key in ordered)


def search(places: Iterable[Section], explained: Iterable[tuple[str, str]], wanted: str, width: int) -> Text:
    """Return the keys and the sentences of explanations that contain `wanted` in their text or title. Case is ignored."""
    wanted = wanted.strip().lower()
    page = _found(places, explained, wanted, width)
    return page if page.plain else Text(f"Nothing in the help contains {wanted!r}.")


def _found(places: Iterable[Section], explained: Iterable[tuple[str, str]], wanted: str, width: int) -> Text:
    page = Text()
    for title, rows in places:
        found = [row for row in rows if wanted in f"{row[0]} {row[1]} {title}".lower()]
        if found:
            page.append(f"{title}\n", style="bold")
            for keys, words in found:
                for row in _row(f"{keys:<{_KEYS_WIDTH}} ", words, _KEYS_WIDTH + 1, width):
                    page.append(f"{row.plain}\n")
    for title, text in explained:
        sentences = [sentence for sentence in text.split(". ") if wanted in f"{sentence} {title}".lower()]
        if sentences:
            page.append(f"{title}\n", style="bold")
            for line in textwrap.wrap(". ".join(sentences), width):
                page.append(f"{line}\n")
    return page
