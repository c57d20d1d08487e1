"""The window that shows the model's inputs, call by call, and has a line in which the user names other inputs."""

from __future__ import annotations

from typing import ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.widgets import Static

from dtype_engine.core import dtypes
from dtype_engine.core.text import printable
from dtype_engine.results.inputs import InputBatch, InputsSummary
from dtype_engine.service import events
from dtype_tui.rendering.plain_table import PlainTable
from dtype_tui.screens.engine_event import EngineEvent
from dtype_tui.screens.modal import SCROLLING, ModalScreen
from dtype_tui.state.controller import Controller
from dtype_tui.widgets.line_input import LineInput

MOST_ROWS = 200


class InputsScreen(ModalScreen[None]):
    """Shows the current inputs, and a line in which the user names others, which are shown once the engine has prepared them."""

    HELP = (
        "A prompt, or the path of a file: text (.txt, .jsonl), an image, audio, or tensors by argument (.safetensors, .npz, .pt). "
        "New text replaces the earlier text, a new image the earlier images, and tensors replace everything. For a pipeline of "
        "diffusers also settings: steps=20 size=512x384 guidance=5 true-cfg=4 negative-prompt='text' strength=0.6 seed=1. An empty "
        "line restores the defaults."
    )

    DEFAULT_CSS = """
    InputsScreen { align: center middle; }
    InputsScreen > Vertical { width: 90%; max-width: 100; height: auto; max-height: 90%; border: round $accent; padding: 0 1;
        background: $surface; }
    InputsScreen VerticalScroll { height: auto; max-height: 100%; scrollbar-size-vertical: 1; }
    InputsScreen Static { height: auto; }
    InputsScreen #inputs-ask { height: auto; margin-top: 1; }
    InputsScreen #inputs-status { max-height: 3; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss", "Close", priority=True),
        *SCROLLING,
    ]

    def __init__(self, controller: Controller) -> None:
        super().__init__()
        self._controller = controller
        self._experiment = controller.experiment

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "Inputs"
            box.border_subtitle = f"{'' if self._controller.read_only else 'Enter applies  '}↑↓ scroll  Esc closes"
            with VerticalScroll(can_focus=False):
                yield Static(id="inputs-rows", markup=False)
            with Vertical(id="inputs-ask"):
                if not self._controller.read_only:
                    yield Static(Text("a prompt, or a file: text, image, audio, tensors; empty: defaults", style="dim"))
                    yield LineInput("inputs-line", self._enter)
                yield Static(id="inputs-status", markup=False)

    def on_mount(self) -> None:
        self._draw()
        self.set_focus(None if self._controller.read_only else self.query_one(LineInput))

    def on_resize(self) -> None:
        # The list is as high as its rows, but never pushes the line below it out of the box.
        self.query_one(VerticalScroll).styles.max_height = max(3, int(self.size.height * 0.9) - 8)

    def _draw(self) -> None:
        model, report = self._experiment.model, self._experiment.results.report
        shown: Table | Text = Text(printable(model.no_forward or "Not known yet.", 500))
        if model.inputs_summary is not None:
            shown = inputs_table(model.inputs_summary, report.output.positions if report is not None else None)
        self.query_one("#inputs-rows", Static).update(shown)

    def _enter(self, line: str) -> None:
        self._show_status("preparing…")
        self._controller.set_inputs(line)

    def on_engine_event(self, message: EngineEvent) -> None:
        match message.event:
            case events.InputsReady():
                self._draw()
                self.query_one(VerticalScroll).scroll_home(animate=False)
                for line in self.query(LineInput):
                    line.value = ""
                self._show_status("ready; measuring…")
            case events.InputsRefused() | events.Refused(job="inputs"):
                # The message line shows the reason; the typed line stays, so that the user can correct it.
                self._show_status("Refused: the inputs above stay in use.", style="bold")
            case events.Measured():
                self._draw()
                self._show_status("")

    def _show_status(self, words: str, style: str = "dim") -> None:
        self.query_one("#inputs-status", Static).update(Text(words, style=style))


def inputs_table(summary: InputsSummary, compared: int | None = None) -> Table:
    """Return a table of the inputs. compared: the number of positions at which outputs were compared."""
    head = PlainTable.labelled()
    for index, part in enumerate(summary.made_of):
        head.add_row("made of" if index == 0 else "", Text(printable(part, 300)))
    counts = [f"{summary.positions:,} tokens"] if summary.positions is not None else []
    if compared is not None:
        counts.append(f"outputs compared at {compared:,}")
    if counts:
        head.add_row("positions", ", ".join(counts))
    rows = PlainTable.grid(padding=(0, 1))
    rows.add_column(style="dim", no_wrap=True, justify="right")
    rows.add_column(overflow="fold")
    for number, batch in enumerate(summary.batches[:MOST_ROWS], 1):
        rows.add_row(str(number), Text(printable(batch.what, 160), no_wrap=True, overflow="ellipsis"))
        rows.add_row("", Text(_arguments(batch), style="dim"))
    if len(summary.batches) > MOST_ROWS:
        rows.add_row("", f"and {len(summary.batches) - MOST_ROWS:,} more")
    whole = PlainTable.grid()
    whole.add_row(Text(printable(summary.description, 200), style="bold"))
    whole.add_row(head)
    whole.add_row("")
    whole.add_row(rows)
    return whole


def _arguments(batch: InputBatch) -> str:
    parts = [
        f"{printable(tensor.name, 60)} {'×'.join(map(str, tensor.shape)) or 'scalar'} {dtypes.short_name(tensor.dtype)}"
        for tensor in batch.tensors
    ]
    if batch.positions is not None:
        parts.insert(0, f"{batch.positions:,} tokens")
    return printable(" · ".join(parts), 1000)
