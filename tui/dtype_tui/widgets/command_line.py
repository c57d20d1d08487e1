"""`:`, the command line: the recipe's own words, completed by Tab, with what was entered before on the arrow keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.message import Message
from textual.widgets import Input, Static

from dtype_engine.core.errors import UserError
from dtype_engine.core.text import printable
from dtype_engine.recipe import Rule
from dtype_tui.state.commands import WITH_PATHS, Command, Completer, parse
from dtype_tui.state.experiment import Experiment, Preview
from dtype_tui.widgets.prompts import describe


class CommandLine(Vertical):
    """One line at the bottom. What it says is checked as it is typed; a cast lights up what it would take."""

    DEFAULT_CSS = """
    CommandLine { dock: bottom; height: 2; display: none; background: $surface; }
    CommandLine.open { display: block; }
    CommandLine Static { height: 1; }
    CommandLine Input { margin: 0 1; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("tab", "complete(1)", "Complete; again: the next that fits", priority=True, show=False),
        Binding("shift+tab", "complete(-1)", "The completion before", priority=True, show=False),
        Binding("up", "earlier(-1)", "What was entered before", priority=True, show=False),
        Binding("down", "earlier(1)", "What was entered after that", priority=True, show=False),
        Binding("escape", "leave", "Leave", priority=True, show=False),
    ]

    @dataclass
    class Entered(Message):
        """Enter: this is to be done."""

        command: Command
        arguments: tuple[str, ...]

    @dataclass
    class Previewed(Message):
        """What a cast in the line would take; None while it is no cast."""

        preview: Preview | None

    class Left(Message):
        """Esc, or Enter on an empty line."""

    def __init__(self, experiment: Experiment, completer: Completer) -> None:
        super().__init__(id="command")
        self.experiment = experiment
        self.completer = completer
        self.entered: list[str] = []
        self._place = 0
        self._fitting: list[str] = []
        self._at = -1
        self._completing = False

    def compose(self) -> ComposeResult:
        yield Input(id="command-input", placeholder="cast *.mlp bf16", select_on_focus=False, compact=True)
        yield Static(id="command-says", markup=False)

    def open(self, line: str = "") -> None:
        """Show it, with a line begun."""
        self.add_class("open")
        self._place = len(self.entered)
        self._forget()
        field = self.query_one(Input)
        field.value = line
        field.cursor_position = len(line)
        self.screen.set_focus(field)
        self._say(line)

    def close(self) -> None:
        self.remove_class("open")
        self.post_message(self.Previewed(None))

    def _forget(self) -> None:
        self._fitting, self._at = [], -1

    def _put(self, line: str) -> None:
        field = self.query_one(Input)
        self._completing = field.value != line
        field.value = line
        field.cursor_position = len(line)

    def action_complete(self, step: int) -> None:
        line = self.query_one(Input).value
        if self._at < 0 or not self._fitting:
            self._fitting = [fitting for fitting in self.completer(line) if fitting != line]
        if not self._fitting:
            return
        if len(self._fitting) == 1:
            # Nothing else fits: go on to the next word.
            only = self._fitting[0]
            command = self.completer.commands.get(only.split(" ")[0])
            more = command is not None and len(only.split(" ")) - 1 < len(command.arguments)
            self._forget()
            self._put(only + (" " if more and not only.endswith("/") else ""))
            return
        self._at = (self._at + step) % len(self._fitting) if self._at >= 0 else (0 if step > 0 else -1)
        self._at %= len(self._fitting)
        self._put(self._fitting[self._at])

    def action_earlier(self, step: int) -> None:
        if self.entered:
            self._place = max(0, min(self._place + step, len(self.entered)))
            self._put(self.entered[self._place] if self._place < len(self.entered) else "")

    def action_leave(self) -> None:
        self.close()
        self.post_message(self.Left())

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        if not self.has_class("open"):
            return
        if not self._completing:
            self._forget()
        self._completing = False
        self._say(event.value)

    def _say(self, line: str) -> None:
        """What the line would do, or what may come next."""
        preview: Preview | None = None
        words = Text(no_wrap=True, overflow="ellipsis")
        try:
            command, arguments = parse(line, self.completer.commands)
            if command.name == "cast":
                preview = self.experiment.preview(Rule.make(*arguments))
                words.append(f" {describe(preview)}")
        except UserError as error:
            if line.strip() and not self.completer(line):
                words.append(f" {error}", style="bold")
        if not words:
            self._suggest(words, line)
        self.query_one("#command-says", Static).update(words)
        self.post_message(self.Previewed(preview))

    def _suggest(self, words: Text, line: str) -> None:
        typed = line.split(" ")
        command = self.completer.commands.get(typed[0])
        if command is not None and (len(typed) > 1 or not command.arguments):
            words.append(f" {command.usage}", style="bold")
            words.append(f"  {command.meaning}", style="dim")
        fitting = self._fitting if self._at >= 0 else self.completer(line)
        paths = command is not None and bool(command.arguments) and command.arguments[-1] in WITH_PATHS
        for place, whole in enumerate(fitting):
            last = whole.rpartition(" ")[2]
            if paths:  # the folders above it stand in the line already
                last = last[last.rstrip("/").rfind("/") + 1 :]
            words.append("  ")
            words.append(printable(last, 80), style="reverse" if place == self._at else "dim")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        line = event.value.strip()
        if not line:
            self.action_leave()
            return
        try:
            command, arguments = parse(line, self.completer.commands)
            refused = self.experiment.refusal(Rule.make(*arguments)) if command.name == "cast" else None
        except UserError as error:
            refused = str(error)
        if refused is not None:
            self.query_one("#command-says", Static).update(Text(f" {refused}", style="bold"))
            return
        if line in self.entered:
            self.entered.remove(line)
        self.entered.append(line)
        self.close()
        self.post_message(self.Entered(command, arguments))
