"""Shows the tour in the main screen and its windows, and offers it at the first start."""

from __future__ import annotations

from typing import Any

from textual.app import App
from textual.binding import Binding
from textual.screen import Screen
from textual.timer import Timer
from textual.widgets import Static

from dtype_tui.config.bindings import KEYS
from dtype_tui.config.key_names import keys_of, on_keyboard
from dtype_tui.screens.modal import ModalScreen
from dtype_tui.state.controller import Controller
from dtype_tui.state.launch import Launch
from dtype_tui.state.tour import Tour
from dtype_tui.widgets.module_tree import ModuleTree
from dtype_tui.widgets.prompts import CastPrompt

_LOOK_EVERY_S = 0.1
"""Seconds between two checks for new windows, which need the tour's panel, and for the completion of the current step."""
_ARROWS = {"↑": "Up", "↓": "Down", "←": "Left", "→": "Right"}
"""Words for the arrow keys. In ASCII mode, the character ↓ would become the letter v, which is another key."""


class TourGuide:
    """Manages the tour, its offer, and the panels that show both. main: the main screen."""

    def __init__(self, app: App[None], main: Screen[None], controller: Controller, launch: Launch) -> None:
        self._app = app
        self._controller = controller
        self._main = main
        self._launch = launch
        self.tour: Tour | None = None
        self._offers = False
        self._timer: Timer | None = None

    def begin(self) -> None:
        """Start or offer the tour, as requested at launch."""
        if self._launch.begins_tour:
            self.begin_or_leave()
        elif self._launch.offers_tour:
            self._offers = True
            self._show()

    def begin_or_leave(self) -> None:
        self._offers = False
        if self.tour is not None:
            self.tour = None
        elif self._launch.is_demo:
            self.tour = Tour(self._controller.experiment, self.key_of, lambda: self._controller.activity.busy)
            self._timer = self._app.set_interval(_LOOK_EVERY_S, self._follow)
        else:
            self._controller.notify("the tour is on the built-in model: start it with `dtype-tui tour`", "information")
        if self.tour is None and self._timer is not None:
            self._timer.stop()
        self._show()

    def closes_offer(self, action: str) -> bool:
        """Close the offer of the tour if `action` is `stop` (Esc). Returns whether it did; the key then has no other effect."""
        if not self._offers or action != "stop":
            return False
        self._offers = False
        self._show()
        return True

    def acted(self, action: str) -> None:
        if self.tour is not None:
            self.tour.acted(action, self._window)
            self._show()

    def _follow(self) -> None:
        if self.tour is not None:
            self.tour.follow(self._window)
            self._show()

    def key_of(self, action: str) -> str:
        """Return the label of the first key of an action. Raises KeyError for an unknown action."""
        for binding in (*KEYS, *ModuleTree.BINDINGS):
            if isinstance(binding, Binding) and binding.id == action:
                shown = on_keyboard(keys_of(binding, self._launch.config.keys).split(",")[0])
                return _ARROWS.get(shown, shown)
        raise KeyError(action)

    @property
    def _window(self) -> str:
        """The class name of the window or prompt that receives the keys, or "" for the main screen."""
        if self._app.screen is not self._main:
            return type(self._app.screen).__name__
        prompts = self._main.query(CastPrompt)
        return CastPrompt.__name__ if prompts and prompts.first().is_open else ""

    def _show(self) -> None:
        for screen in self._app.screen_stack:
            if screen.is_mounted and (screen is self._main or isinstance(screen, ModalScreen)):
                self._show_on(screen)

    def _show_on(self, screen: Screen[Any]) -> None:
        panel = next(iter(screen.query(TourPanel)), None)
        if self.tour is None and not self._offers:
            if panel is not None:
                panel.remove()
            return
        if panel is None:
            panel = TourPanel()
            screen.mount(panel)
        if self.tour is not None:
            panel.show(self.tour.heading, self.tour.words)
        elif self._launch.is_demo:
            begins = f"{self.key_of('tour')} starts a tour: two minutes, with these keys on this model."
            panel.show("New here?", f"{begins} {self.key_of('stop')} closes this; it is not offered again.")
        else:
            words = "`dtype-tui tour` teaches the keys in two minutes, on a built-in model."
            panel.show("New here?", f"{words} {self.key_of('stop')} closes this; it is not shown again.")


class TourPanel(Static):
    """The panel that shows the tour's step. It covers nothing: the widgets above it become smaller."""

    DEFAULT_CSS = """
    TourPanel { split: bottom; height: auto; border-top: solid $accent; border-title-color: $accent; padding: 0 1;
        background: $background; }
    """

    def __init__(self) -> None:
        super().__init__(markup=False)

    def show(self, heading: str, words: str) -> None:
        """Show a heading and a text. Redraws only if they have changed, since a redraw costs bytes on a slow connection."""
        if self.border_title != heading:
            self.border_title = heading
        if self.content != words:
            self.update(words)
