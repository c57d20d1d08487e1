"""The parameters with which the app starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dtype_engine.core.options import RunSettings
from dtype_engine.recipe import Recipe
from dtype_engine.results.thresholds import Limit
from dtype_tui.config.config import Config

if TYPE_CHECKING:
    from dtype_engine.core.tree import Tree
    from dtype_tui.state.session_saver import SessionSaver
    from dtype_tui.state.session_store import SavedSession


class Launch(msgspec.Struct, frozen=True):
    """The parameters that the command line gives the app."""

    title: str
    tree: Tree | None = None
    """The module tree from the headers, or None if they are not enough to build it."""
    path: Path | None = None
    """The path of the model, or None if this machine has no file of the model."""
    partial: bool = False
    """Whether `tree` covers only some headers of a large checkpoint."""
    settings: RunSettings = msgspec.field(default_factory=RunSettings)
    thresholds: tuple[Limit, ...] = ()
    context: int | None = None
    """The tokens of each sequence for which the bytes of KV caches are shown, or None for the default."""
    batch: int = 1
    budget: int | None = None
    """The bytes into which the served model is to fit, or None."""
    recipe: Recipe = msgspec.field(default_factory=Recipe)
    """The rules from the command line, which are appended to the rules of `preset` or of `saved`."""
    preset: str | None = None
    saved: SavedSession | None = None
    """The session to resume, or None."""
    saver: Callable[[], SessionSaver] | None = None
    """Creates the object that saves the session. Called after the first paint. None if the session is not saved."""
    config: Config = msgspec.field(default_factory=Config)
    read_only: bool = False
    """Whether viewers may only look and cast, but neither read nor write files."""
    is_demo: bool = False
    begins_tour: bool = False
    offers_tour: bool = False
    """Whether the app shows, at its start, a panel that offers the tour."""
