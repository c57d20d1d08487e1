"""The window in which the reference continues a prompt, and the candidate is compared with it: at each token, or by its text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.widgets import Static

from dtype_engine.core.text import printable
from dtype_engine.core.units import plural, seconds_text
from dtype_engine.reports.text import parting
from dtype_engine.reports.text_tokens import MARKS, counts_text, summary_rows
from dtype_engine.results.runs import Generation, Written
from dtype_engine.results.token_choices import TextChoices, TokenReport
from dtype_engine.service import events
from dtype_engine.service.jobs import GENERATE, TOKENS, GenerateText, Job
from dtype_tui.rendering.hint_keys import with_keys
from dtype_tui.rendering.plain_table import PlainTable
from dtype_tui.screens.engine_event import EngineEvent
from dtype_tui.screens.modal import SCROLLING, ModalScreen
from dtype_tui.widgets.line_input import LineInput

MOST_TOKENS = 4096
MOST_TEXTS = 100
_MOST_CHARACTERS = 100_000
"""Maximum number of characters shown of a text; a line break counts as 80. A text of 4,096 tokens has about half as many."""
_MOST_OF_A_PIECE = 1000
_TITLES = {False: "Each token of the reference's text", True: "Generate with reference and candidate"}
"""The title of the window, by whether freely decoded texts are shown."""
_ABOUT = {
    False: "The reference writes, and the candidate is asked at each token.",
    True: "Both texts are decoded greedily, from the same prompt.",
}
_STYLES = {"tie": "underline", "different": "bold reverse"}


class GenerationScreen(ModalScreen[None]):
    """Asks for a prompt and a length, and shows the reference's text, as it is written, with the tokens at which the candidate
    would differ. F2 changes to the texts of both, decoded freely, in which the first token that differs is in brackets.

    wanted: the last request, or None. free: whether to show freely decoded texts. found: what was found for the request; if None,
    it is asked for at once. start: called with a new request and `free`; returns whether the engine works on it. stop: called if
    the window is closed while the engine works.
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
        Binding("f2", "other_view", "Each token, or the candidate's own text", priority=True),
        *SCROLLING,
    ]

    def __init__(
        self,
        wanted: GenerateText | None,
        free: bool,
        found: TokenReport | tuple[Generation, ...] | None,
        start: Callable[[GenerateText, bool], bool],
        stop: Callable[[], None],
    ) -> None:
        super().__init__()
        self._wanted = wanted
        self._free = free
        self._found = found
        self._start = start
        self._stop = stop
        self._asked = False
        """Whether the engine works on a request."""

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = _TITLES[self._free]
            box.border_subtitle = "Enter generates  Tab prompt, length  F2 view  ↑↓ scroll  Esc closes"
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
        if self._found is not None:
            self._show(self._found)
        elif self._wanted is not None:
            self._enter("")
        else:
            self._say(_ABOUT[self._free])

    def _enter(self, _: str) -> None:
        typed = self.query_one("#generate-tokens", LineInput).value.strip()
        if not typed.isdecimal() or not 1 <= int(typed) <= MOST_TOKENS:
            self._say(f"Give a length from 1 to {MOST_TOKENS:,} tokens.")
            return
        self._wanted = GenerateText(int(typed), self.query_one("#generate-prompt", LineInput).value)
        self._asked = self._start(self._wanted, self._free)
        if self._asked:
            self._say("generating…")

    def action_other_view(self) -> None:
        """Change what is asked, and ask it if something was asked before."""
        if self._asked:
            self._say("This runs until it is done; Esc stops it.")
            return
        self._free = not self._free
        self.query_one(Vertical).border_title = _TITLES[self._free]
        self._put(Text())
        self._say(_ABOUT[self._free])
        if self._wanted is not None:
            self._enter("")

    def action_other_line(self) -> None:
        lines = list(self.query(LineInput))
        self.set_focus(lines[1] if lines[0].has_focus else lines[0])

    def action_leave(self) -> None:
        if self._asked:
            self._stop()
        self.dismiss()

    def on_engine_event(self, message: EngineEvent) -> None:
        event = message.event
        match event:
            case events.JobGrown() if (text := events.partial_of(event, self._job)) is not None and self._asked:
                grows = "candidate" if text.candidate.ids else "reference"
                self._say(f"generating: {grows}")
                self._draw_texts((text,))
            case events.JobDone() if (found := events.result_of(event, self._job)) is not None:
                self._asked = False
                self._show(found)
            case events.Refused() if event.job == self._job.name and self._asked:
                self._asked = False
                self._put(Text(with_keys(event.message)))
                self._say("")
            case events.Failed() | events.Stopped() | events.Refused() | events.EngineEnded():
                # The message line shows the reason.
                self._asked = False
                self._say("")

    @property
    def _job(self) -> Job[GenerateText, Generation, TokenReport | tuple[Generation, ...]]:
        return GENERATE if self._free else TOKENS  # type: ignore[return-value]

    def _show(self, found: TokenReport | tuple[Generation, ...]) -> None:
        self._say("")
        if isinstance(found, TokenReport):
            self._draw_choices(found)
        else:
            self._draw_texts(found)

    def _draw_choices(self, report: TokenReport) -> None:
        rows = PlainTable.grid(padding=(0, 1), expand=True)
        rows.add_column(no_wrap=True)
        rows.add_column(ratio=1, overflow="fold")
        for name, words in summary_rows(report):
            rows.add_row(Text(name, style="dim"), Text(words))
        for notice in report.notices:
            rows.add_row(Text("note", style="dim"), Text(notice))
        for text in report.texts[:MOST_TEXTS]:
            rows.add_row("", "")
            rows.add_row(Text("reference", style="bold"), _chosen(text))
            rows.add_row("", Text(f"{counts_text(text)}; {_pace(text.reference)}", style="dim"))
        _add_more(rows, len(report.texts))
        self._put(rows)

    def _draw_texts(self, texts: Sequence[Generation]) -> None:
        grid = PlainTable.grid(padding=(0, 2), expand=True)
        grid.add_column(ratio=1, overflow="fold")
        grid.add_column(ratio=1, overflow="fold")
        for number, text in enumerate(texts[:MOST_TEXTS]):
            if number:
                grid.add_row("", "")
            begun = bool(text.candidate.ids)
            grid.add_row(
                Text("reference", style="bold"), Text("candidate" if begun or self._free else "", style="bold")
            )
            grid.add_row(_written(text, text.reference), _written(text, text.candidate) if begun or self._free else "")
            grid.add_row(*(Text(_pace(written), style="dim") for written in (text.reference, text.candidate)))
            if text.finished or text.differs:
                grid.add_row(Text(parting(text), style="bold" if text.differs else ""), "")
        _add_more(grid, len(texts))
        self._put(grid)

    def _put(self, shown: RenderableType) -> None:
        self.query_one("#generate-texts", Static).update(shown)

    def _say(self, words: str) -> None:
        self.query_one("#generate-says", Static).update(Text(words, style="dim"))


def _add_more(grid: Table, count: int) -> None:
    if count > MOST_TEXTS:
        grid.add_row("", Text(f"and {count - MOST_TEXTS:,} more", style="dim"))


def _written(text: Generation, written: Written) -> Text:
    """Return the end of the prompt, dimmed, and `written`, the continuation by one of the two models. The first token that differs
    is in brackets.
    """
    parts_at = text.same_tokens if text.differs else None
    return _joined(
        text.prompt,
        (
            (f"⟦{_piece(piece)}⟧", "bold reverse") if index == parts_at else (_piece(piece), "not dim")
            for index, piece in enumerate(written.pieces)
        ),
    )


def _chosen(text: TextChoices) -> Text:
    """Return the end of the prompt, dimmed, and the reference's text. Where the candidate would differ, its token follows."""
    pairs = zip(text.kinds, text.reference.pieces, text.candidate_pieces, strict=True)
    return _joined(
        text.prompt,
        (
            (MARKS[kind].format(_piece(own), _piece(other)), _STYLES[kind])
            if kind in MARKS
            else (_piece(own), "not dim")
            for kind, own, other in pairs
        ),
    )


def _joined(prompt: str, parts: Iterable[tuple[str, str]]) -> Text:
    """Return the end of a prompt, dimmed, and (text, style) for each token after it, as far as there is room."""
    shown = Text(_safe_lines("…" + prompt[-60:] if len(prompt) > 60 else prompt), style="dim")
    room = _MOST_CHARACTERS
    for part, style in parts:
        if room < 0:
            shown.append("…", style="dim")
            break
        room -= len(part) + 80 * part.count("\n")
        shown.append(part, style=style)
    return shown


def _piece(piece: str) -> str:
    return _safe_lines(piece[:_MOST_OF_A_PIECE])


def _safe_lines(text: str) -> str:
    return "\n".join(printable(line, 2000) for line in text.split("\n"))


def _pace(written: Written) -> str:
    if not written.ids:
        return ""
    rate = len(written.ids) / written.seconds if written.seconds else 0.0
    pace = f"{rate:.0f}/s" if rate >= 1 or not rate else f"{seconds_text(1 / rate)} each"
    return f"{plural(len(written.ids), 'token')}, {seconds_text(written.seconds)}, {pace}"
