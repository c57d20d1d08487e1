"""The help screen: every key of every screen, read from the bindings, and the meaning of the panes' words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.table import Table
from rich.text import Text
from textual.binding import BindingType

from dtype_tui.config.bindings import FRONT_KEYS
from dtype_tui.config.key_names import described
from dtype_tui.screens.causes import CausesScreen
from dtype_tui.screens.history import MeasurementsScreen
from dtype_tui.screens.inputs import InputsScreen
from dtype_tui.screens.overlay import Overlay
from dtype_tui.screens.presets import PresetsScreen
from dtype_tui.screens.save import SaveScreen
from dtype_tui.screens.scan import ScanScreen
from dtype_tui.screens.scan_setup import ScanSetup
from dtype_tui.screens.settings import SettingsScreen
from dtype_tui.widgets.command_line import CommandLine
from dtype_tui.widgets.module_tree import ModuleTree
from dtype_tui.widgets.prompts import CastPrompt, FilterPrompt

Section = tuple[str, list[tuple[str, str]]]


def sections(
    of_the_app: Iterable[BindingType], chosen: Mapping[str, str], words: Iterable[tuple[str, str]]
) -> tuple[list[Section], list[tuple[str, str]]]:
    """(title, its keys) of every screen and prompt, and (title, text) of every word explained; `chosen` as in `described`."""
    places: tuple[tuple[str, Iterable[BindingType]], ...] = (
        ("Casting and measuring", of_the_app),
        ("In the tree", ModuleTree.BINDINGS),
        ("In the cast prompt", CastPrompt.BINDINGS),
        ("In the filter", FilterPrompt.BINDINGS),
        ("In the command line", CommandLine.BINDINGS),
        ("In the settings", SettingsScreen.BINDINGS),
        ("In the inputs", InputsScreen.BINDINGS),
        ("In the dtypes to scan", ScanSetup.BINDINGS),
        ("In the scan", ScanScreen.BINDINGS),
        ("Along the front", FRONT_KEYS),
        ("In drift over depth", CausesScreen.BINDINGS),
        ("In the history", MeasurementsScreen.BINDINGS),
        ("In the presets", PresetsScreen.BINDINGS),
        ("In what to leave with", SaveScreen.BINDINGS),
        ("In a box of text", Overlay.BINDINGS),
    )
    explained = [*words, ("Inputs", InputsScreen.HELP), ("Sensitivity", ScanScreen.HELP)]
    return [(title, list(described(bindings, chosen))) for title, bindings in places], explained


def help_screen(sections: Iterable[tuple[str, Iterable[tuple[str, str]]]], words: Iterable[tuple[str, str]]) -> Overlay:
    """Every key, from the bindings themselves, and what the panes' words mean."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for title, rows in sections:
        grid.add_row(Text(title, style="bold"), "")
        for keys, what in rows:
            grid.add_row(f"  {keys}", what)
        grid.add_row("", "")
    for title, text in words:
        grid.add_row(Text(title, style="bold"), text)
    return Overlay("Help", grid)
