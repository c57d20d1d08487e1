"""The window in which the reference and the candidate continue a prompt, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.widgets import Static

from dtype_engine.core.text import printable
from dtype_engine.core.units import plural, seconds_text
from dtype_engine.reports.text import parting
from dtype_engine.results.runs import Generation, Written
from dtype_engine.service import events
from dtype_engine.service.jobs import GENERATE, GenerateText
from dtype_tui.rendering.plain_table import PlainTable
from dtype_tui.screens.engine_event import EngineEvent
from dtype_tui.screens.modal import SCROLLING, ModalScreen
from dtype_tui.widgets.line_input import LineInput

MOST_TOKENS = 4096
MOST_TEXTS = 100
_MOST_CHARACTERS = 100_000
"""Maximum number of characters shown of a text; a line break counts as 80. A text of 4,096 tokens has about half as many."""
_MOST_OF_A_PIECE = 1000


class GenerationScreen(ModalScreen[None]):
    """Asks for a prompt and a length, and shows the texts of the reference and the candidate as they are generated. The first
    token that differs is in brackets.

    wanted: the last request, or None. texts: the texts generated for it; if empty, they are generated at once. start: called with
    a new request; returns whether the engine works on it. stop: called if the window is closed while generating.
    """

    DEFAULT_CSS = """
    GenerationScreen { align: center middle; }
    GenerationScreen > Vertical { width: 96%; max-width: 140; height: 90%; border: round $accent; padding: 0 1;
        background: $surface; }
    GenerationScreen VerticalScroll { height: 1fr; margin-top: 1; scrollbar-size-vertical: 1; }
    GenerationScreen VerticalScroll > Static { height: auto; }
    GenerationScreen Vertical > Static { height: 1; }
    GenerationScreen Horizontal { height: 1; }
    GenerationScreen Horizontal > Static { width: auto; color: $text-muted; }
    GenerationScreen Horizontal > LineInput { width: 1fr; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "Close, and stop generating", priority=True),
        Binding("tab,shift+tab", "other_line", "Prompt, length", priority=True),
        *SCROLLING,
    ]

    def __init__(
        self,
        wanted: GenerateText | None,
        texts: Sequence[Generation],
        start: Callable[[GenerateText], bool],
        stop: Callable[[], None],
    ) -> None:
        super().__init__()
        self._wanted = wanted
        self._texts = tuple(texts)
        self._start = start
        self._stop = stop
        self._running = False

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "Generate with reference and candidate"
            box.border_subtitle = "Enter generates  Tab prompt, length  ↑↓ scroll  Esc closes"
            with Horizontal():
                yield Static("prompt  ", markup=False)
                yield LineInput("generate-prompt", self._enter, placeholder="empty: the model's inputs")
            with Horizontal():
                yield Static("tokens  ", markup=False)
                yield LineInput("generate-tokens", self._enter, placeholder="how many to generate")
            yield Static(id="generate-says", markup=False)
            with VerticalScroll(can_focus=False):
                yield Static(id="generate-texts", markup=False)

    def on_mount(self) -> None:
        prompt, tokens = self.query_one("#generate-prompt", LineInput), self.query_one("#generate-tokens", LineInput)
        prompt.put(self._wanted.prompt if self._wanted is not None else "")
        tokens.put(str(self._wanted.tokens if self._wanted is not None else 48))
        self.set_focus(prompt)
        if self._texts:
            self._draw(self._texts)
            self._say("")
        elif self._wanted is not None:
            self._enter("")
        else:
            self._say("Both texts are decoded greedily, from the same prompt.")

    def _enter(self, _: str) -> None:
        typed = self.query_one("#generate-tokens", LineInput).value.strip()
        if not typed.isdecimal() or not 1 <= int(typed) <= MOST_TOKENS:
            self._say(f"Give a length from 1 to {MOST_TOKENS:,} tokens.")
            return
        self._running = self._start(GenerateText(int(typed), self.query_one("#generate-prompt", LineInput).value))
        if self._running:
            self._say("generating…")

    def action_other_line(self) -> None:
        lines = list(self.query(LineInput))
        self.set_focus(lines[1] if lines[0].has_focus else lines[0])

    def action_leave(self) -> None:
        if self._running:
            self._stop()
        self.dismiss()

    def on_engine_event(self, message: EngineEvent) -> None:
        event = message.event
        match event:
            case events.JobGrown() if (text := events.partial_of(event, GENERATE)) is not None and self._running:
                grows = "candidate" if text.candidate.ids else "reference"
                self._say(f"generating: {grows}")
                self._draw((text,))
            case events.JobDone() if (texts := events.result_of(event, GENERATE)) is not None:
                self._running, self._texts = False, texts
                self._draw(texts)
                self._say("")
            case events.Failed() | events.Stopped() | events.Refused() | events.EngineEnded():
                # The message line shows the reason.
                self._running = False
                self._say("")

    def _draw(self, texts: Sequence[Generation]) -> None:
        grid = PlainTable.grid(padding=(0, 2), expand=True)
        grid.add_column(ratio=1, overflow="fold")
        grid.add_column(ratio=1, overflow="fold")
        for number, text in enumerate(texts[:MOST_TEXTS]):
            if number:
                grid.add_row("", "")
            grid.add_row(Text("reference", style="bold"), Text("candidate", style="bold"))
            grid.add_row(_written(text, text.reference), _written(text, text.candidate))
            grid.add_row(*(Text(_pace(written), style="dim") for written in (text.reference, text.candidate)))
            if text.finished or text.differs:
                grid.add_row(Text(parting(text), style="bold" if text.differs else ""), "")
        if len(texts) > MOST_TEXTS:
            grid.add_row(Text(f"and {len(texts) - MOST_TEXTS:,} more", style="dim"), "")
        self.query_one("#generate-texts", Static).update(grid)

    def _say(self, words: str) -> None:
        self.query_one("#generate-says", Static).update(Text(words, style="dim"))


def _written(text: Generation, written: Written) -> Text:
    """Return the end of the prompt, dimmed, and `written`, the continuation by one of the two models. The first token that differs
    is in brackets.
    """
    shown = Text(_safe_lines("…" + text.prompt[-60:] if len(text.prompt) > 60 else text.prompt), style="dim")
    parts_at = text.same_tokens if text.differs else None
    room = _MOST_CHARACTERS
    for index, piece in enumerate(written.pieces):
        if room < 0:
            shown.append("…", style="dim")
            break
        piece = piece[:_MOST_OF_A_PIECE]
        room -= len(piece) + 80 * piece.count("\n")
        if index == parts_at:
            shown.append(f"⟦{_safe_lines(piece)}⟧", style="bold reverse")
        else:
            shown.append(_safe_lines(piece), style="not dim")
    return shown


def _safe_lines(text: str) -> str:
    return "\n".join(printable(line, 2000) for line in text.split("\n"))


def _pace(written: Written) -> str:
    if not written.ids:
        return ""
    rate = len(written.ids) / written.seconds if written.seconds else 0.0
    pace = f"{rate:.0f}/s" if rate >= 1 or not rate else f"{seconds_text(1 / rate)} each"
    return f"{plural(len(written.ids), 'token')}, {seconds_text(written.seconds)}, {pace}"
