"""The settings of a run, over the main screen: three choices, each with what it means."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Static

from dtype_engine.core import dtypes
from dtype_engine.core.options import RunSettings
from dtype_tui.screens.modal import ModalScreen

CHOICES: tuple[tuple[str, str, tuple[tuple[object, str], ...], str], ...] = (
    (
        "autocast",
        "autocast",
        ((None, "off"), ("bfloat16", "bf16"), ("float16", "f16")),
        "Run the candidate under torch.autocast: matrix products in this dtype, sums and norms in float32. The weights stay "
        "as they are cast.",
    ),
    (
        "float_inputs",
        "floating inputs",
        (("given", "as given"), ("model", "follow the model")),
        "Pictures and sounds come in float32. Follow the model casts them to the dtype of its first weight, as "
        "inputs.to(model.dtype) does. Token ids are not touched.",
    ),
    (
        "compute",
        "storage-only weights",
        tuple((name, dtypes.badge(name)) for name in ("float32", "bfloat16", "float16", "float64")),
        "What fp8 and int8 weights come back to where no activation says which: an embedding look-up, say.",
    ),
)


class SettingsScreen(ModalScreen[RunSettings | None]):
    """Up and down choose a setting, left and right change it; the result is the settings, or None when left."""

    DEFAULT_CSS = """
    SettingsScreen { align: center middle; }
    SettingsScreen > VerticalScroll { width: 90%; max-width: 76; height: auto; max-height: 90%; border: round $accent;
        padding: 0 1; background: $surface; }
    SettingsScreen Static { height: auto; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k,shift+tab", "move(-1)", "Setting above"),
        Binding("down,j,tab", "move(1)", "Setting below"),
        Binding("left,h", "change(-1)", "Choice before"),
        Binding("right,l,space", "change(1)", "Choice after"),
        Binding("enter", "apply", "Put them in force and measure"),
        Binding("escape,q", "leave", "Leave everything as it was"),
    ]

    def __init__(self, settings: RunSettings) -> None:
        super().__init__()
        self._settings = settings
        self._at = 0

    def compose(self) -> ComposeResult:
        with VerticalScroll(can_focus=False) as box:
            box.border_title = "Settings of a run"
            box.border_subtitle = "↑↓ ←→ choose  Enter applies  Esc leaves"
            yield Static(markup=False)

    def on_mount(self) -> None:
        self._draw()

    def on_resize(self) -> None:
        self.call_after_refresh(self._draw)

    def _draw(self) -> None:
        text = Text()
        for place, (field, title, choices, meaning) in enumerate(CHOICES):
            here = place == self._at
            text.append("\n› " if here else "\n  ", style="bold")
            text.append(f"{title:<22}", style="bold" if here else "")
            for value, name in choices:
                chosen = getattr(self._settings, field) == value
                text.append(f"[{name}]" if chosen else f" {name} ", style="bold" if chosen else "dim")
                text.append(" ")
            text.append("\n")
            if here:
                for line in textwrap.wrap(meaning, max(20, self.query_one(Static).size.width - 4)):
                    text.append(f"    {line}\n", style="dim")
        self.query_one(Static).update(text)

    def action_move(self, step: int) -> None:
        self._at = (self._at + step) % len(CHOICES)
        self._draw()

    def action_change(self, step: int) -> None:
        field, _, choices, _ = CHOICES[self._at]
        values = [value for value, _ in choices]
        place = (values.index(getattr(self._settings, field)) + step) % len(values)
        self._settings = dataclasses.replace(self._settings, **{field: values[place]})  # type: ignore[arg-type]
        self._draw()

    def action_apply(self) -> None:
        self.dismiss(self._settings)

    def action_leave(self) -> None:
        self.dismiss(None)
