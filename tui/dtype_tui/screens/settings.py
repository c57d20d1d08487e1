"""The window with the settings of a run: four choices and their explanations."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.widgets import Static

from dtype_engine.core import dtypes
from dtype_engine.core.options import RunSettings
from dtype_tui.screens.choice import ChoiceScreen

CHOICES: tuple[tuple[str, str, tuple[tuple[object, str], ...], str], ...] = (
    (
        "autocast",
        "autocast",
        ((None, "off"), ("bfloat16", "bf16"), ("float16", "f16")),
        "Run the candidate under torch.autocast: matrix products in this dtype, sums and norms in float32. The weights keep the "
        "dtypes of the recipe.",
    ),
    (
        "float_inputs",
        "floating inputs",
        (("given", "as given"), ("model", "follow the model")),
        "Pictures and sounds are given in float32. `follow the model` casts them to the dtype of its first weight, as "
        "inputs.to(model.dtype) does. Token ids are not cast.",
    ),
    (
        "quantize_activations",
        "activations",
        (("none", "not quantised"), ("weights", "as weights")),
        "`as weights` rounds the input of a matrix product to the format of its weight, like runtimes that serve W8A8 and W4A4. "
        "`not quantised` measures the weights alone.",
    ),
    (
        "compute",
        "storage-only weights",
        tuple((name, dtypes.short_name(name)) for name in ("float32", "bfloat16", "float16", "float64")),
        "The dtype to which fp8 and int8 weights are converted where no activation determines it, as in an embedding look-up.",
    ),
)
"""(field of RunSettings, title, choices as (value, label), explanation)."""


class SettingsScreen(ChoiceScreen[RunSettings | None]):
    """Up and down choose a setting, left and right change it. The result is the settings, or None if the user leaves."""

    HEADING = "Settings of a run"
    KEYS = "↑↓ ←→ choose  Enter applies  Esc closes"
    DEFAULT_CSS = "SettingsScreen > VerticalScroll { width: 90%; max-width: 76; }"

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k,shift+tab", "move(-1)", "Setting above"),
        Binding("down,j,tab", "move(1)", "Setting below"),
        Binding("left,h", "change(-1)", "Previous choice"),
        Binding("right,l,space", "change(1)", "Next choice"),
        Binding("enter", "apply", "Apply the settings and measure"),
        Binding("escape,q", "leave", "Close, and change nothing"),
    ]

    def __init__(self, settings: RunSettings) -> None:
        super().__init__(len(CHOICES))
        self._settings = settings

    def draw(self) -> Text:
        text = Text()
        for index, (field, title, choices, meaning) in enumerate(CHOICES):
            text.append("\n")
            text.append(*self.marker(index))
            text.append(f"{title:<22}", style="bold" if index == self.index else "")
            for value, name in choices:
                chosen = getattr(self._settings, field) == value
                text.append(f"[{name}]" if chosen else f" {name} ", style="bold" if chosen else "dim")
                text.append(" ")
            text.append("\n")
            if index == self.index:
                for line in textwrap.wrap(meaning, max(20, self.query_one(Static).size.width - 4)):
                    text.append(f"    {line}\n", style="dim")
        return text

    def action_change(self, step: int) -> None:
        field, _, choices, _ = CHOICES[self.index]
        values = [value for value, _ in choices]
        value = values[(values.index(getattr(self._settings, field)) + step) % len(values)]
        self._settings = dataclasses.replace(self._settings, **{field: value})  # type: ignore[arg-type]
        self.redraw()

    def action_apply(self) -> None:
        self.dismiss(self._settings)
