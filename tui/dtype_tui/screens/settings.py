"""The window that shows the settings of a run, with the possible values of each setting and an explanation."""

from __future__ import annotations

import dataclasses
import functools
import textwrap
from typing import Any, ClassVar

import msgspec
from rich.text import Text
from textual.binding import Binding, BindingType

from dtype_engine.core import dtypes
from dtype_engine.core.execution import EXCLUDE, PLAIN
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
        "Images and audio are given in float32. `follow the model` casts them to the dtype of the model's first weight, as "
        "inputs.to(model.dtype) does. Token ids are not cast.",
    ),
    (
        "quantize_activations",
        "activations",
        (("none", "not quantized"), ("weights", "as weights")),
        "`as weights` rounds the input of a matrix product to the weight's format, like runtimes that serve W8A8 and W4A4. "
        "`not quantized` casts only the weights.",
    ),
    (
        "compute",
        "storage-only weights",
        tuple((name, dtypes.short_name(name)) for name in ("float32", "bfloat16", "float16", "float64")),
        "The dtype to which fp8 and int8 weights are converted if no activation determines it, as in an embedding look-up.",
    ),
    (
        "classes_dim",
        "classes",
        (("auto", "auto"), ("none", "none"), (1, "dim 1"), (-1, "last dim")),
        "The dimension of the output along which classes or tokens have a distribution. With `none`, drift has no KL and no same "
        "top-1. `auto` follows the model's class and configuration.",
    ),
    (
        "acceptance",
        "acceptance",
        ((False, "not measured"), (True, "measured")),
        "How often speculative sampling from the reference keeps a token that the candidate drafts: the sum of min(p, q) over all "
        "tokens.",
    ),
    (
        "execution.attention",
        "attention",
        ((None, "as loaded"), *((name, name) for name in ("eager", "sdpa", "math", "flash"))),
        "The implementation of attention that the candidate runs with. `math` and `flash` are kernels of torch's "
        "scaled_dot_product_attention. The same weights give other outputs.",
    ),
    (
        "execution.batch",
        "sequences at once",
        tuple((count, str(count)) for count in (1, 2, 4, 8)),
        "How many sequences the candidate runs in one batch. Shorter ones are padded on the right.",
    ),
    (
        "execution.decode",
        "tokens",
        ((False, "all at once"), (True, "one by one")),
        "`one by one` runs the candidate token by token with a KV cache, as decoding does, one sequence at a time.",
    ),
)
"""The settings: (field of RunSettings, dotted if nested, title, values as (value, label), explanation)."""


class SettingsScreen(ChoiceScreen[RunSettings]):
    """The window in which the user changes settings. Its result is the changed settings."""

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
        for index, (field, title, _, meaning) in enumerate(CHOICES):
            text.append("\n")
            text.append(*self.marker(index))
            text.append(f"{title:<22}", style="bold" if index == self.index else "")
            for value, name in self._choices(index):
                chosen = _value(self._settings, field) == value
                text.append(f"[{name}]" if chosen else f" {name} ", style="bold" if chosen else "dim")
                text.append(" ")
            text.append("\n")
            if index == self.index:
                for line in textwrap.wrap(meaning, max(20, self.lines.size.width - 4)):
                    text.append(f"    {line}\n", style="dim")
        return text

    def _choices(self, index: int) -> tuple[tuple[object, str], ...]:
        """Return (value, label) of each choice of a setting. If only the command line can set the current value, it is added."""
        field, _, choices, _ = CHOICES[index]
        value = _value(self._settings, field)
        return choices if value in [each for each, _ in choices] else (*choices, (value, str(value)))

    def action_change(self, step: int) -> None:
        field = CHOICES[self.index][0]
        values = [value for value, _ in self._choices(self.index)]
        value = values[(values.index(_value(self._settings, field)) + step) % len(values)]
        self._settings = _with(self._settings, field, value)
        self.redraw()

    def action_apply(self) -> None:
        self.dismiss(self._settings)


def _value(settings: RunSettings, field: str) -> object:
    return functools.reduce(getattr, field.split("."), settings)


def _with(settings: RunSettings, field: str, value: object) -> RunSettings:
    """Return the settings with another value of a field. Where it excludes the value of another field, that one is the default."""
    name, _, nested = field.partition(".")
    changed: Any = value
    if nested:
        excluded = EXCLUDE.get(nested, ()) if value != getattr(PLAIN, nested) else ()
        defaults = {other: getattr(PLAIN, other) for other in excluded}
        changed = msgspec.structs.replace(getattr(settings, name), **{nested: value}, **defaults)
    return dataclasses.replace(settings, **{name: changed})
