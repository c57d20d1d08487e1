"""The two prompts at the bottom: cast, with its live preview, and filter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.message import Message
from textual.timer import Timer
from textual.widgets import Input, Static

from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.core.units import human_bytes, human_count
from dtype_engine.recipe import Rule, generalisations
from dtype_tui.state.experiment import Experiment, Preview
from dtype_tui.widgets.module_tree import MOST_MATCHES

_PREVIEW_AFTER_S = 0.04


class CastPrompt(Vertical):
    """`PATTERN=DTYPE`, filled with the node under the cursor. What it would take is said, and lit up in the tree, as
    it is typed.
    """

    HELP = "Tab walks from the node itself to its kind: model.layers.3.mlp, model.layers.*.mlp, *.mlp, type:LlamaMLP."

    DEFAULT_CSS = """
    CastPrompt { dock: bottom; height: 3; display: none; background: $surface; }
    CastPrompt.open { display: block; }
    CastPrompt Input { margin: 0 1; }
    CastPrompt Static { height: 1; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("tab", "generalise(1)", "More general", priority=True, show=False),
        Binding("shift+tab", "generalise(-1)", "Less general", priority=True, show=False),
        Binding("escape", "leave", "Leave", priority=True, show=False),
    ]

    @dataclass
    class Previewed(Message):
        """What the rule in the prompt would take; None while it can't be read."""

        preview: Preview | None

    @dataclass
    class Applied(Message):
        """Enter: this rule is to be put in force."""

        rule: Rule

    class Left(Message):
        """Esc."""

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(id="cast")
        self.experiment = experiment
        self._steps: list[str] = []
        self._step = 0
        self._dtype = "bf16"
        self._timer: Timer | None = None

    def compose(self) -> ComposeResult:
        yield Static(Text(" cast PATTERN=DTYPE   Tab: more general   Enter: cast   Esc: leave", style="dim"))
        yield Input(id="cast-input", select_on_focus=False, compact=True)
        yield Static(id="cast-preview", markup=False)

    def open(self, node: str) -> None:
        """Show the prompt for a node."""
        module = self.experiment.tree.modules.get(node)
        steps = generalisations(node, module.class_name if module else None)
        # Each is more general than the one before: where the first takes something, all do.
        self._steps = steps if self._takes_something(steps[0]) else steps[:1]
        self._step = 0
        self.add_class("open")
        self._fill()
        self.screen.set_focus(self.query_one(Input))

    def close(self) -> None:
        """Hide it; what it lit up goes dark."""
        if self._timer is not None:
            self._timer.stop()
        self.remove_class("open")
        self.post_message(self.Previewed(None))

    def _takes_something(self, pattern: str) -> bool:
        return bool(self.experiment.preview(Rule(pattern, dtypes.STORED)).tensors)

    def _fill(self) -> None:
        field = self.query_one(Input)
        field.value = f"{self._steps[self._step]}={self._dtype}"
        field.cursor_position = len(field.value)

    def action_generalise(self, step: int) -> None:
        _, equals, dtype = self.query_one(Input).value.rpartition("=")
        if equals and dtype.strip():
            self._dtype = dtype.strip()
        self._step = (self._step + step) % len(self._steps)
        self._fill()

    def action_leave(self) -> None:
        self.close()
        self.post_message(self.Left())

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        if self._timer is not None:
            self._timer.stop()
        self._timer = self.set_timer(_PREVIEW_AFTER_S, self._preview)

    def _preview(self) -> None:
        if not self.has_class("open"):
            return
        preview: Preview | None = None
        try:
            preview = self.experiment.preview(Rule.parse(self.query_one(Input).value))
        except UserError as error:
            words = Text(f" {error}", style="bold")
        else:
            words = Text(f" {describe(preview)}")
        self.query_one("#cast-preview", Static).update(words)
        self.post_message(self.Previewed(preview))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        try:
            rule = Rule.parse(event.value)
            refused = self.experiment.refusal(rule)
        except UserError as error:
            refused = str(error)
        if refused is not None:
            if self._timer is not None:
                self._timer.stop()  # the preview would say less
            self.query_one("#cast-preview", Static).update(Text(f" {refused}", style="bold"))
            return
        self._dtype = event.value.rpartition("=")[2].strip()
        self.close()
        self.post_message(self.Applied(rule))


def describe(preview: Preview) -> str:
    """`takes 12 tensors · 3.2 M parameters · 12.80 MiB → 6.40 MiB`."""
    if not preview.tensors:
        if preview.fixed:
            return (
                f"takes nothing: its {preview.fixed} tensors are never cast (integers, or buffers that are not saved)"
            )
        return "takes nothing in this model"
    count = len(preview.tensors)
    return (
        f"takes {count:,} tensor{'s' if count != 1 else ''} · {human_count(preview.elements)} parameters · "
        f"{human_bytes(preview.bytes_before)} → {human_bytes(preview.bytes_after)}"
    )


class FilterPrompt(Vertical):
    """`/`: shows only the nodes whose names match, as it is typed. Enter keeps the filter, Esc clears it."""

    DEFAULT_CSS = """
    FilterPrompt { dock: bottom; height: 2; display: none; background: $surface; }
    FilterPrompt.open { display: block; }
    FilterPrompt Static { height: 1; }
    FilterPrompt Input { margin: 0 1; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "clear", "Clear", priority=True, show=False)]

    @dataclass
    class Changed(Message):
        """The text to filter by."""

        text: str

    @dataclass
    class Done(Message):
        """Back to the tree; `keep` says whether the filter stays."""

        keep: bool

    def __init__(self, count: Callable[[], int]) -> None:
        super().__init__(id="filter")
        self._count = count

    def compose(self) -> ComposeResult:
        yield Input(placeholder="part of a name, or a glob", id="filter-input", select_on_focus=False, compact=True)
        yield Static(id="filter-count", markup=False)

    def open(self, text: str) -> None:
        """Show the prompt with the filter in force."""
        self.add_class("open")
        field = self.query_one(Input)
        field.value = text
        self.screen.set_focus(field)
        self._say()

    def _say(self) -> None:
        count = self._count()
        shown = f", the first {MOST_MATCHES:,} shown" if count > MOST_MATCHES else ""
        words = f" {count:,} matches{shown} · Enter keeps the filter, then n and N walk · Esc clears"
        self.query_one("#filter-count", Static).update(Text(words, style="dim"))

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        if self.has_class("open"):
            self.post_message(self.Changed(event.value))
            self.call_after_refresh(self._say)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.remove_class("open")
        self.post_message(self.Done(True))

    def action_clear(self) -> None:
        self.remove_class("open")
        self.post_message(self.Done(False))
