"""The `:` line for commands. Tab completes a command, and the arrow keys recall earlier lines."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType

from dtype_engine.core.errors import UserError
from dtype_engine.core.text import printable
from dtype_engine.recipe import Rule
from dtype_tui.state.commands import WITH_PATHS, Command, Completer, find, parse
from dtype_tui.state.experiment import Experiment
from dtype_tui.state.preview import Preview, cache_change, preview
from dtype_tui.widgets.bottom_prompt import BottomPrompt
from dtype_tui.widgets.prompts import preview_words


class CommandLine(BottomPrompt):
    """A line for commands, checked while the user types. For `cast`, the tree highlights the nodes that the pattern matches."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("tab", "complete(1)", "Complete, or go to the next completion", priority=True, show=False),
        Binding("shift+tab", "complete(-1)", "The previous completion", priority=True, show=False),
        Binding("up", "earlier(-1)", "The previous line of the history", priority=True, show=False),
        Binding("down", "earlier(1)", "The next line of the history", priority=True, show=False),
        Binding("escape", "cancel", "Leave", priority=True, show=False),
    ]

    def __init__(
        self, experiment: Experiment, completer: Completer, run: Callable[[Command, tuple[str, ...]], Awaitable[None]]
    ) -> None:
        """run: called with a command and its arguments when the user presses Enter."""
        super().__init__("command", "cast *.mlp bf16")
        self.experiment = experiment
        self.completer = completer
        self._run = run
        self.history: list[str] = []
        """The entered lines, the newest last, without duplicates."""
        self._history_index = 0
        self._completions: list[str] = []
        self._completion = -1
        """Index of the completion that the line shows, or -1 if it shows none."""
        self._completing = False
        """Whether the text is being changed by a completion or the history, not by the user."""

    def open(self, begun: str = "") -> None:
        """Show the line, with a command that is already begun."""
        self._history_index = len(self.history)
        self._drop_completions()
        self.show_with(begun)
        self._explain(begun)

    def _drop_completions(self) -> None:
        self._completions, self._completion = [], -1

    def _complete_with(self, line: str) -> None:
        self._completing = True
        self.field.put(line)
        self._completing = False

    def action_complete(self, step: int) -> None:
        line = self.field.value
        if self._completion < 0 or not self._completions:
            self._completions = [completion for completion in self.completer(line) if completion != line]
        if not self._completions:
            return
        if len(self._completions) == 1:
            # A single completion is accepted at once, so the next word can follow.
            only = self._completions[0]
            command = find(only.split(" ")[0], self.completer.commands)
            more = command is not None and len(only.split(" ")) - 1 < len(command.arguments)
            self._drop_completions()
            self._complete_with(only + (" " if more and not only.endswith("/") else ""))
            return
        start = self._completion if self._completion >= 0 else -1 if step > 0 else 0
        self._completion = (start + step) % len(self._completions)
        self._complete_with(self._completions[self._completion])

    def action_earlier(self, step: int) -> None:
        if self.history:
            self._history_index = max(0, min(self._history_index + step, len(self.history)))
            self._complete_with(self.history[self._history_index] if self._history_index < len(self.history) else "")

    def typed(self, line: str) -> None:
        if self.is_open:
            if not self._completing:
                self._drop_completions()
            self._explain(line)

    def _explain(self, line: str) -> None:
        """Show below the line what the typed command would do, or how it can be completed."""
        shown: Preview | None = None
        words = Text(no_wrap=True, overflow="ellipsis")
        try:
            command, arguments = parse(line, self.completer.commands)
            if command.name == "cast":
                rule = Rule.make(*arguments)
                shown = preview(self.experiment.tree, self.experiment.plan, rule)
                words.append(f" {preview_words(shown, cache_change(self.experiment, shown, rule.dtype))}")
        except UserError as error:
            if line.strip() and not self.completer(line):
                words = Text(f" {error}", style="bold")
        if not words:
            self._suggest(words, line)
        self.hint(words)
        self.post_message(self.Previewed(shown))

    def _suggest(self, words: Text, line: str) -> None:
        typed = line.split(" ")
        command = find(typed[0], self.completer.commands)
        completions = self._completions if self._completion >= 0 else self.completer(line)
        if command is None and len(completions) == 1:
            command = self.completer.commands[completions[0]]
        if command is not None and (len(typed) > 1 or not command.arguments or command.name != typed[0]):
            words.append(f" {command.usage}", style="bold")
            words.append(f"  {command.meaning}", style="dim")
        paths = command is not None and bool(command.arguments) and command.arguments[-1] in WITH_PATHS
        for index, completed in enumerate(completions):
            last = completed.rpartition(" ")[2]
            if paths:  # the folders above it are already in the line
                last = last[last.rstrip("/").rfind("/") + 1 :]
            words.append("  ")
            words.append(printable(last, 80), style="reverse" if index == self._completion else "dim")

    async def entered(self, line: str) -> None:
        line = line.strip()
        if not line:
            self.action_cancel()
            return
        try:
            command, arguments = parse(line, self.completer.commands)
            refused = self.experiment.refusal(Rule.make(*arguments)) if command.name == "cast" else None
        except UserError as error:
            refused = str(error)
        if refused is not None:
            self.hint(Text(f" {refused}", style="bold"))
            return
        self.history = [*(earlier for earlier in self.history if earlier != line), line]
        self.close()
        await self._run(command, arguments)
