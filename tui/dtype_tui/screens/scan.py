"""The window that shows the results of a scan: a ranking of weights, and a map with a cell for each layer and kind of module."""

from __future__ import annotations

import math
from typing import ClassVar

from rich.style import Style
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import DataTable, Static

from dtype_engine.core import dtypes
from dtype_engine.core.text import printable
from dtype_engine.core.units import less_error, with_error
from dtype_engine.results.scan import WeightScore
from dtype_engine.search.sensitivity import layer_map, ranking
from dtype_tui.rendering.cells import meter, short_bytes, truncate
from dtype_tui.rendering.palette import colour, heat
from dtype_tui.screens.modal import ModalScreen
from dtype_tui.state.controller import Controller
from dtype_tui.state.scan import figure

MOST_ROWS = 1000
_GAIN_WIDTH = 16
_SHADES = " ·░▒▓█"


class ScanScreen(ModalScreen[str]):
    """Shows the scan's current estimates. The window's result is a node to go to, or `AGAIN` to resume or start a scan."""

    AGAIN: ClassVar[str] = ":scan"
    HELP = (
        "A score is the drift of a model in which only this weight is cast to the dtype: in nats per token (KL divergence), or "
        "as relative squared error if the output is not a distribution. ± is its standard error. Scores are nearly additive: a "
        "node's score is the sum over its weights. The bar is full for the score of the whole model, and a cell shorter for "
        "every power of ten below it. With a rounding such as GPTQ, the last column says what it does to the "
        "squared error of the layer's output."
    )

    DEFAULT_CSS = """
    ScanScreen { background: $background; }
    ScanScreen > #scan-title, ScanScreen > #scan-keys { height: 1; }
    ScanScreen > #scan-title { background: $surface; }
    ScanScreen > DataTable { height: 1fr; scrollbar-size-vertical: 1; }
    ScanScreen > VerticalScroll { height: 1fr; display: none; scrollbar-size: 1 1; overflow-x: auto; padding: 0 1; }
    ScanScreen > VerticalScroll > Static { width: auto; height: auto; }
    ScanScreen.map > DataTable { display: none; }
    ScanScreen.map > VerticalScroll { display: block; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left,h", "dtype(-1)", "Previous dtype"),
        Binding("right,l", "dtype(1)", "Next dtype; the tree also shows its scores", priority=True),
        Binding("b", "sort", "Sort by score, or by score per byte saved"),
        Binding("a", "all", "Rank all dtypes together, or only the shown dtype"),
        Binding("m", "map", "Show the map of layers, or the ranking"),
        Binding("space", "pause", "Pause the scan, or continue it"),
        Binding("s", "again", "Resume a stopped scan, or start another scan"),
        Binding("j", "move(1)", "Down", show=False),
        Binding("k", "move(-1)", "Up", show=False),
        Binding("enter", "go", "Go to the weight in the tree", priority=True),
        Binding("escape,q", "leave", "Close; the scan continues"),
    ]

    def __init__(self, controller: Controller) -> None:
        super().__init__()
        self._controller = controller
        self.experiment = controller.experiment
        self.view = self.experiment.scan
        self._all = self._per_byte = False
        self._names: list[str] = []
        self._seen = -1

    def compose(self) -> ComposeResult:
        yield Static(id="scan-title", markup=False)
        yield DataTable(cursor_type="row", zebra_stripes=False, cell_padding=1, cursor_foreground_priority="renderable")
        with VerticalScroll():
            yield Static(id="scan-map", markup=False)
        yield Static(id="scan-keys", markup=False)

    def on_mount(self) -> None:
        self.show_figures()

    def on_resize(self) -> None:
        self._seen = -1
        self.call_after_refresh(self.show_figures)

    def show_figures(self) -> None:
        if self._seen != self.view.version and self.is_mounted:
            self._seen = self.view.version
            self._draw()

    def _draw(self) -> None:
        report = self.view.report
        if report is None:
            return
        shown = "all dtypes" if self._all else dtypes.short_name(self.view.dtype)
        state = "" if self.view.finished else "  scanning" if self.view.running else "  stopped: s resumes"
        state = "  ended: s resumes" if self.view.lost else state
        state = "  paused: Space continues" if self.view.paused else state
        title = Text(no_wrap=True, overflow="ellipsis")
        title.append(" Sensitivity ", style="bold")
        title.append(f"‹ {shown} ›", style=f"bold {colour(self.view.dtype)}")
        title.append(f"  {report.unit}")
        title.append(f"  {report.sequences} of {report.all_sequences} sequences{state}", style="dim")
        self.query_one("#scan-title", Static).update(title)
        other = "per byte" if not self._per_byte else "by score"
        keys = f" ←→ dtype  a all  b {other}  m map  Enter go to  Space pause  Esc back"
        if self.has_class("map"):
            keys = " ←→ dtype  ↑↓ scroll  m ranking  Space pause  Esc back"
        self.query_one("#scan-keys", Static).update(Text(keys, style="dim", no_wrap=True, overflow="ellipsis"))
        self._draw_ranking()
        self.query_one("#scan-map", Static).update(self._map())

    def _draw_ranking(self) -> None:
        report = self.view.report
        assert report is not None
        table = self.query_one(DataTable)
        at = table.cursor_row
        before = self._names[at] if self._names and 0 <= at < len(self._names) else None
        dtype = None if self._all else self.view.dtype
        rows = ranking(self.experiment.tree, report, dtype, self._per_byte)[:MOST_ROWS]
        table.clear(columns=True)
        wide = self.size.width >= 100
        gains = any(row.score.rounding_gain is not None for row in rows)
        taken = 40 + (21 if wide else 0) + (9 if self._all else 0) + (_GAIN_WIDTH + 2 if gains else 0)
        name_width = max(12, self.size.width - taken)
        table.add_column("weight", width=name_width)
        if self._all:
            table.add_column("dtype", width=7)
        table.add_column(Text("score", justify="right"), width=21 if wide else 16)
        table.add_column("heat", width=4)
        table.add_column(Text("saved", justify="right"), width=10)
        if wide:
            table.add_column(Text("per MiB", justify="right"), width=10)
        if gains:
            table.add_column(Text("rounding", justify="right"), width=_GAIN_WIDTH)
        most = max((row.score.score for row in rows if math.isfinite(row.score.score)), default=0.0)
        self._names = [row.score.name for row in rows]
        for row in rows:
            share = _share(row.score.score, most)
            name = printable(row.score.name, 500).removesuffix(".weight")
            cells = [Text(name if len(name) <= name_width else "…" + name[-(name_width - 1) :])]
            if self._all:
                cells.append(Text(dtypes.short_name(row.score.dtype), style=colour(row.score.dtype)))
            cells += [
                Text(_score(row.score, wide), justify="right"),
                Text.assemble(*meter(share, 4, heat(share))),
                Text(short_bytes(row.saved) if row.saved > 0 else "-", justify="right"),
            ]
            if wide:
                per = row.per_byte * 2**20
                cells.append(Text(figure(per) if math.isfinite(per) else "-", justify="right"))
            if gains:
                gain = row.score.rounding_gain
                cells.append(Text("-" if gain is None else less_error(gain), justify="right"))
            table.add_row(*cells)
        if before in self._names:
            table.move_cursor(row=at if self._names[at : at + 1] == [before] else self._names.index(before))

    def _map(self) -> Text:
        layers_map = layer_map(self.experiment.tree, self.view.scores, self.view.dtype)
        most = max((value for value in layers_map.cells.values() if math.isfinite(value)), default=0.0)
        labels = [printable(layer, 60) for layer in layers_map.layers]
        labels = [label if len(label) <= 18 else "…" + label[-17:] for label in labels]
        first = max((len(label) for label in labels), default=0) + 1
        width = max(6, min(13, (self.size.width - first - 4) // max(1, len(layers_map.kinds))))
        heads = short_kinds(layers_map.kinds, width - 1)
        text = Text(f"{'layer':<{first}}", style="dim", no_wrap=True)
        for head in heads:
            text.append(f"{head:<{width}}", style="bold not dim")
        for layer, label in zip(layers_map.layers, labels, strict=True):
            text.append(f"\n{label:<{first}}")
            for kind in layers_map.kinds:
                score = layers_map.cells.get((layer, kind))
                if score is None:
                    text.append(" " * width)
                    continue
                digits = 1 if width > 6 else 0
                exponent = "inf" if math.isinf(score) else f"{math.log10(score):.{digits}f}" if score > 0 else "0"
                text.append(
                    f"{truncate(_shade(score, most) * 2 + exponent, width - 1):<{width}}",
                    style=_heat_style(_share(score, most)),
                )
        rest = sorted(layers_map.rest, key=lambda entry: -entry[1])
        if rest:
            text.append("\n\nin no layer", style="dim")
            for name, score in rest[:8]:
                text.append(f"\n{_shade(score, most) * 2} {figure(score):>8}  ", style=_heat_style(_share(score, most)))
                text.append(printable(name, 80))
        unit = self.view.report.unit if self.view.report else ""
        text.append(f"\n\nfigures: log10 of {unit}\nshades ", style="dim")
        text.append(_SHADES[1:])
        text.append(": from a hundredth of the highest score to the highest", style="dim")
        kinds = [
            f"{head} {printable(kind, 60)}" for head, kind in zip(heads, layers_map.kinds, strict=True) if head != kind
        ]
        line = ""
        for kind in kinds:
            if len(line) + len(kind) + 3 > max(40, self.size.width - 4):
                text.append(f"\n{line}", style="dim")
                line = ""
            line += ("   " if line else "") + kind
        text.append(f"\n{line}", style="dim")
        return text

    def action_dtype(self, step: int) -> None:
        report = self.view.report
        if report is not None:
            index = report.dtypes.index(self.view.dtype) + step
            self._all = False
            self.view.show_dtype(self.experiment.tree, report.dtypes[index % len(report.dtypes)])
            self.show_figures()

    def action_sort(self) -> None:
        self._per_byte = not self._per_byte
        self._draw()

    def action_all(self) -> None:
        self._all = not self._all
        self._draw()

    def action_map(self) -> None:
        self.toggle_class("map")
        (self.query_one(VerticalScroll) if self.has_class("map") else self.query_one(DataTable)).focus()
        self._draw()

    def action_move(self, step: int) -> None:
        if self.has_class("map"):
            self.action_scroll(step)
        elif step > 0:
            self.query_one(DataTable).action_cursor_down()
        else:
            self.query_one(DataTable).action_cursor_up()

    def action_pause(self) -> None:
        self._controller.pause_scan()
        self._draw()

    def action_again(self) -> None:
        self.dismiss(self.AGAIN)

    def action_go(self) -> None:
        at = self.query_one(DataTable).cursor_row
        if not self.has_class("map") and 0 <= at < len(self._names):
            self.dismiss(self._names[at])


def _score(score: WeightScore, wide: bool) -> str:
    """Return a score with its error: `7.4097e-05 ± 2.5e-06`. wide: whether to write all significant digits."""
    if math.isinf(score.score):
        return "not finite"
    if wide:
        return with_error(score.score, score.error)
    return figure(score.score) + (f" ± {score.error:.0e}" if score.error else "")


def short_kinds(kinds: tuple[str, ...], width: int) -> list[str]:
    """Return a unique heading of at most `width` cells for each kind of module: the last part of the kind's name, such as `q`, or
    the end of the whole name if several kinds have the same last part.
    """
    last = [kind.removesuffix("_proj").rpartition(".")[2] for kind in kinds]
    heads = [
        truncate(printable(short, 60), width)
        if last.count(short) == 1
        else truncate(printable(kind, 200)[-width:], width)
        for short, kind in zip(last, kinds, strict=True)
    ]
    # Headings that became equal by truncation are numbered; the legend below the map explains them.
    return [
        head if heads.count(head) == 1 else f"{head[: width - 2]}{index % 100:02}" for index, head in enumerate(heads)
    ]


def _share(score: float, most: float) -> float:
    """Return a score on a logarithmic scale: 1 for `most`, the highest score, and 0 for at most a hundredth of that."""
    if math.isinf(score):
        return 1.0
    return max(0.0, 1 + math.log10(score / most) / 2) if score > 0 and most > 0 else 0.0


def _shade(score: float, most: float) -> str:
    """Return a character for a score in the map. The closer the score is to `most`, the denser is the character."""
    if math.isinf(score):
        return "!"
    return _SHADES[0] if score <= 0 else _SHADES[1 + min(4, int(_share(score, most) * 4.999))]


def _heat_style(share: float) -> Style:
    return Style(color=heat(share), bold=share > 0.75) if share > 0 else Style(dim=True)
