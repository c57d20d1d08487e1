"""The window that saves a checkpoint, a recipe file, a report, or a recipe for another tool."""

from __future__ import annotations

import re
import textwrap
from itertools import chain, count
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Static

from dtype_engine.checkpoint.export_folder import check_typed_path, is_one_file
from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.core.file_layouts import COMPRESSED_TENSORS
from dtype_engine.core.text import printable, without_controls
from dtype_engine.core.units import human_bytes, plural
from dtype_engine.core.user_folders import expanded
from dtype_engine.recipe.loading import Loading
from dtype_engine.recipe.targets import TARGET_SUFFIXES
from dtype_engine.reports.text_losses import severe_sentences
from dtype_engine.service import events
from dtype_engine.service.save_requests import (
    ConvertRequest,
    ExportRequest,
    RecipeRequest,
    ReportRequest,
    SaveRequest,
)
from dtype_tui.rendering.hint_keys import with_keys
from dtype_tui.screens.choice import ChoiceScreen
from dtype_tui.screens.engine_event import EngineEvent
from dtype_tui.state.controller import Controller
from dtype_tui.state.loading import loading_lines, loading_reasons
from dtype_tui.state.results import Results
from dtype_tui.widgets.line_input import LineInput
from dtype_tui.widgets.loading import find_loadings, takes_a_thread

TOOLS = {
    "torchao": "the recipe as torchao's configuration in config.json",
    "llama.cpp": "the recipe as types of tensors for llama-quantize",
    "diffusers": "pipelines: the recipe as layerwise casting",
    "llm-compressor": "the recipe for llm-compressor, which writes for vLLM",
    "transformers": "the recipe as Python that loads and casts the model",
    "modelopt": "the recipe as quant_cfg of NVIDIA ModelOpt",
    "comfyui": "pipelines: the recipe as ComfyUI's metadata",
    "vllm": "the recipe for vLLM, which quantizes as it loads",
    "sglang": "a command for SGLang, which quantizes as it loads",
}
"""What is written for each tool of `TARGET_SUFFIXES`."""
KINDS: tuple[tuple[str, str], ...] = (
    ("checkpoint", "safetensors that load back in just these dtypes"),
    ("recipe", "rules, settings and the measurement, to use again"),
    ("report", "one page: rules, memory, drift, modules (.html, .md)"),
    *((target, TOOLS[target]) for target in TARGET_SUFFIXES),
    ("gptq", "a checkpoint with integers in groups in GPTQ's layout"),
)
LAYOUTS = {"checkpoint": COMPRESSED_TENSORS, "gptq": "gptq"}
"""The layouts of weights with scales, by the kinds that are checkpoints."""
WRITTEN_THERE = (*LAYOUTS, "report")
"""The kinds of file that an engine on another machine writes on that machine."""


class SaveScreen(ChoiceScreen[SaveRequest]):
    """The window in which the user chooses a kind of file and types its path. Its result is the request to write the file."""

    HEADING = "Save"
    KEYS = "↑↓ choose  Enter writes  Esc closes"
    DEFAULT_CSS = """
    SaveScreen > VerticalScroll { max-height: 94%; scrollbar-size-vertical: 1; }
    SaveScreen Input { margin: 0; }
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,shift+tab", "move(-1)", "Kind above", priority=True),
        Binding("down,tab", "move(1)", "Kind below", priority=True),
        Binding("enter", "write", "Write the file", priority=True),
        Binding("escape", "leave", "Close, and write nothing", priority=True),
    ]

    def __init__(self, controller: Controller) -> None:
        super().__init__(len(KINDS))
        self._experiment = controller.experiment
        self._engine = controller.engine
        title = self._experiment.model.title.rpartition("/")[2]
        self._base = re.sub(r"[^A-Za-z0-9._-]+", "-", title).strip(".-") or "model"
        self._asked = self._experiment.recipe
        """The recipe for which the engine was asked what will be written."""
        self._planned: events.ExportPlanned | None = None
        self._warned: str | None = None
        """The existing path that the user was warned about."""
        self._checking: str | None = None
        """The path that an engine on another machine is checking."""
        self._loadings: tuple[Loading, ...] | None = ()
        """How programs load the export, or None while a thread finds it."""

    def compose_box(self) -> ComposeResult:
        yield Static(id="kinds", markup=False)
        yield LineInput("where", lambda _: self.action_write(), self._path_typed)
        yield Static(id="about", markup=False)

    def on_mount(self) -> None:
        self.set_focus(self.query_one(LineInput))
        self.action_move(0)
        self._find_loadings()

    def _find_loadings(self) -> None:
        if takes_a_thread(self._experiment, self._experiment.plan):
            self._loadings = None
        find_loadings(self, self._experiment, self._experiment.plan, self._loadings_found)

    def _loadings_found(self, found: tuple[Loading, ...]) -> None:
        self._loadings = found
        if self.is_mounted:
            self.redraw()

    def on_engine_event(self, message: EngineEvent) -> None:
        if self._experiment.recipe != self._asked:  # a preset that waited for the model, for example
            self._asked, self._planned = self._experiment.recipe, None
            self._engine.plan_export()
            self.redraw()
        match message.event:
            case events.ExportPlanned() as planned:
                self._planned = planned
                self._find_loadings()
                self.redraw()
            case events.CastDone():
                self.redraw()
            case events.PathChecked() as checked if checked.path == without_controls(self._checking or ""):
                path, self._checking = self._checking or "", None
                if checked.reason:
                    self.redraw()
                    self.notify(with_keys(checked.reason), severity="error", markup=False)
                else:
                    self._write_to(path, Path(path), checked.taken)

    @property
    def _kind(self) -> str:
        return KINDS[self.index][0]

    @property
    def _is_remote(self) -> bool:
        return bool(self._engine.host) and self._kind in WRITTEN_THERE

    @property
    def _thing(self) -> str:
        return "new folder" if self._kind in LAYOUTS else "new file"

    def _free_name(self) -> str:
        """Return a file name that is not taken in the working directory. For a file on another machine, this is not checked."""
        ending = {"checkpoint": "-cast", "gptq": "-gptq", "recipe": ".recipe.yaml", "report": "-report.html"}
        end = ending.get(self._kind) or f".{self._kind}{TARGET_SUFFIXES[self._kind]}"
        word, dot, suffix = end.partition(".")
        further = (f"{self._base}{word}-{number}{dot}{suffix}" for number in count(2))
        names = chain([f"{self._base}{end}"], further)
        return next(name for name in names if self._is_remote or not Path(name).exists())

    def draw(self) -> Text:
        text = Text()
        for index, (name, meaning) in enumerate(KINDS):
            chosen = index == self.index
            text.append(*self.marker(index))
            text.append(f"{name:<15}", style="bold" if chosen else "")
            text.append(f"{meaning}\n", style="" if chosen else "dim")
        place = f" on {self._engine.host}" if self._is_remote else " here" if self._engine.host else ""
        one_file = "; a name in .pth or .safetensors makes one file" if self._kind == "checkpoint" else ""
        text.append(f"\nto a {self._thing}{place}{one_file}", style="dim")
        return text

    def redraw(self) -> None:
        super().redraw()
        about = self.query_one("#about", Static)
        text = Text()
        for line, style in self._about():
            for part in textwrap.wrap(printable(line, 1200), max(30, about.size.width - 1)):
                text.append(f"{part}\n", style=style)
        about.update(text)

    def _about(self) -> list[tuple[str, str]]:
        if self._checking is not None:
            return [(f"checking whether {self._checking} exists on {self._engine.host}…", "")]
        if self._warned is not None:
            return [(f"{self._warned} already exists: Enter again replaces it.", "bold")]
        if self._kind == "checkpoint":
            return self._about_export()
        measured = self._experiment.results.report is not None
        words = "What the tool can't express is reported when the file is written."
        if self._kind == "recipe":
            with_drift = "with the figures on the screen" if measured else "not measured yet, so it will hold no drift"
            words = f"{plural(len(self._experiment.recipe), 'rule').capitalize()}, {with_drift}."
        elif self._kind == "report":
            first = "The recipe is measured first, which takes a forward pass."
            words = "With the figures on the screen." if measured else first
        elif self._kind in LAYOUTS:
            words = (
                "GPTQModel and vLLM load it. A weight that the layout can't hold is named when the folder is written."
            )
        return [(words, "")]

    def _about_export(self) -> list[tuple[str, str]]:
        planned = self._planned
        if planned is None:
            opening = not self._experiment.model.live and self._experiment.model.no_forward is None
            waits = "What will be written appears when the model is loaded."
            return [(waits if opening else "Working out what will be written…", "dim")]
        if planned.plan is None:
            return [(with_keys(planned.reason), "bold")]
        plan = planned.plan
        mix = " · ".join(f"{dtypes.short_name(name)} {human_bytes(size)}" for name, _, size in plan.dtypes)
        tensors = sum(count for _, count, _ in plan.dtypes)
        one_file = is_one_file(Path(self._typed))
        if one_file and plan.no_one_file:
            return [(f"One file of weights can't hold this: {plan.no_one_file}. Name a folder instead.", "bold")]
        files = "1 file" if one_file or plan.files == 1 else f"{plan.files} files"
        lines = [(f"{human_bytes(plan.nbytes)} in {files}, {tensors:,} tensors: {mix}", "bold")]
        if not self._experiment.recipe.rules:
            lines.append(("There are no rules: this is a copy.", ""))
        lost = plan.lost if plan.lost is not None else self._experiment.results.losses.values
        if lost is None:
            lines.append(("The export checks whether the casts lose values.", ""))
        else:
            lines += [(f"⚠ {sentence}", "bold") for sentence in severe_sentences(lost, 3)]
        lines += [(notice, "") for notice in plan.notices]
        if one_file:
            return [*lines, (_loading_one_file(self._typed), "dim")]
        width = max(30, self.query_one("#about", Static).size.width - 1)
        lines += [(line, "") for line in loading_lines(self._loadings, width)]
        return [*lines, *((line, "dim") for line in (plan.loading, *loading_reasons(self._loadings or ())))]

    def action_move(self, step: int) -> None:
        self._warned = self._checking = None
        super().action_move(step)
        self.query_one(LineInput).put(self._free_name(), select=True)

    def _path_typed(self, line: str) -> None:
        """Show what will be written to the typed path, and withdraw a warning about another path."""
        if any(path not in (None, line.strip()) for path in (self._warned, self._checking)):
            self._warned = self._checking = None
        self.redraw()

    @property
    def _typed(self) -> str:
        return self.query_one(LineInput).value.strip()

    def action_write(self) -> None:
        typed = self._typed
        if not typed:
            self.notify(f"type the path of the {self._thing} first", severity="warning", markup=False)
            return
        if self._is_remote:
            self._checking = typed
            self._engine.check_path(typed, self._kind in LAYOUTS)
            self.redraw()
            return
        try:
            taken = check_typed_path(typed, self._kind in LAYOUTS, self._experiment.model.path)
        except UserError as error:
            self.notify(str(error), severity="error", markup=False)
        else:
            self._write_to(typed, expanded(typed), taken)

    def _write_to(self, typed: str, path: Path, taken: bool) -> None:
        """Close the window with the request to write. If the path is taken, only warn at first; a second Enter replaces it."""
        if taken and self._warned != typed:
            self._warned = typed
            self.redraw()
            return
        self.dismiss(save_request(self._kind, path, taken, self._experiment.results))


def _loading_one_file(typed: str) -> str:
    """Return how to load the file of weights that an export to `typed` makes."""
    reader = "safetensors.torch.load_file" if typed.endswith(".safetensors") else "torch.load"
    return f"Weights alone: {reader} reads them, and module.load_state_dict(weights, assign=True) keeps these dtypes."


def save_request(kind: str, path: Path, replace: bool, results: Results) -> SaveRequest:
    """Return the request to write a file of one of `KINDS`. replace: whether to replace an existing file."""
    match kind:
        case "checkpoint" | "gptq":
            return ExportRequest(path, replace, LAYOUTS[kind])
        case "recipe":
            return RecipeRequest(path, replace, results.report)
        case "report":
            return ReportRequest(path, replace, results.report, results.nonfinite, results.speed)
        case target:
            return ConvertRequest(path, target, replace)
