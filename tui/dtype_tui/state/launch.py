"""What the app begins with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dtype_engine.core.options import RunSettings
from dtype_engine.recipe import Recipe
from dtype_engine.results.thresholds import Thresholds
from dtype_tui.config.config import Config

if TYPE_CHECKING:
    from dtype_engine.core.tree import Tree
    from dtype_tui.state.session_saver import SessionSaver
    from dtype_tui.state.session_store import SavedSession


@dataclass(frozen=True)
class Launch:
    """All that the command line says to the app, made once.

    tree: of the headers read so far; None where nothing is known before the model is open. partial: `tree` is that of the first
    of a large checkpoint's headers alone. recipe: to put in force, after the rules of `preset` and of the session taken up.
    saver: makes what saves the session; called after the first paint. is_demo: it is the built-in model, which the tour is about.
    begins_tour: with the tour. offers_tour: with a line that says that there is one.
    """

    title: str
    tree: Tree | None = None
    partial: bool = False
    settings: RunSettings = field(default_factory=RunSettings)
    thresholds: Thresholds = field(default_factory=Thresholds)
    recipe: Recipe = field(default_factory=Recipe)
    preset: str | None = None
    saved: SavedSession | None = None
    saver: Callable[[], SessionSaver] | None = None
    config: Config = field(default_factory=Config)
    is_demo: bool = False
    begins_tour: bool = False
    offers_tour: bool = False
