"""The app on the demo's headers, with an engine that only notes what it is told; events are fed by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tests.helpers import draw_times
from tests.helpers.screen_text import drawn
from textual.pilot import Pilot

from dtype_engine.checkpoint.source import locate
from dtype_engine.core.options import RunSettings
from dtype_engine.core.tree import Tree
from dtype_engine.recipe import Recipe
from dtype_engine.results.drift import DriftReport, Extent, ModuleDrift, OutputDrift, Seconds
from dtype_engine.results.memory import MemoryStats
from dtype_engine.service import events
from dtype_engine.service.commands import (
    Cancel,
    Command,
    FollowRecipe,
    Pause,
    Request,
    Scan,
    SetInputs,
    SetRecipe,
    SetSettings,
)
from dtype_engine.service.engine import Engine
from dtype_engine.service.jobs import Ask, GenerateText, InspectTensor
from dtype_engine.service.save_requests import SaveRequest
from dtype_tui.app import DtypeApp
from dtype_tui.state.launch import Launch


@dataclass
class RecordingEngine(Engine):
    """Remembers the commands; says what a test makes it say."""

    can_restart: ClassVar[bool] = True
    emit: Callable[[events.Event], None]
    recipes: list[Recipe] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    settings: list[RunSettings] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    saves: list[SaveRequest] = field(default_factory=list)

    def start(self) -> None:
        self.commands.append("start")

    def request(self, request: Request) -> None:
        match request:
            case SetRecipe():
                self.recipes.append(request.recipe)
            case FollowRecipe():
                self.commands.append(f"follow {request.recipe}")
            case SetSettings():
                self.settings.append(request.settings)
            case SetInputs():
                self.lines.append(request.line)
            case Ask(job, GenerateText(tokens, prompt)):
                self.commands.append(f"{job} {tokens} {prompt}".rstrip())
            case Scan():
                self.commands.append(f"scan {','.join(request.dtypes)}")
            case Pause():
                self.commands.append("pause" if request.paused else "go on")
            case Ask(parameters=InspectTensor(tensor, with_gains=with_gains)):
                self.commands.append(f"look at {tensor}{' with gains' if with_gains else ''}")
            case Cancel():
                self.commands.append("cancel" if request.name is None else f"cancel {request.name}")
            case Command():
                self.commands.append(request.name)

    def plan_export(self) -> None:
        self.commands.append("plan export")

    def check_path(self, path: str, for_export: bool) -> None:
        self.commands.append(f"check {path}{' for an export' if for_export else ''}")

    def save(self, request: SaveRequest) -> None:
        self.commands.append("save")
        self.saves.append(request)

    def restart(self) -> None:
        self.commands.append("restart")

    def close(self, wait_s: float = 0) -> None:
        self.commands.append("close")


def demo_tree() -> Tree:
    checkpoint = locate(None).open()
    assert checkpoint is not None
    return checkpoint.tree()


def make_app(tree: Tree | None = None, title: str = "demo", **more: Any) -> DtypeApp:
    """The app on a tree, the demo's unless another is given; `more` as in `Launch`."""
    is_demo = tree is None
    return app_of(Launch(title, tree if tree is not None else demo_tree(), **{"is_demo": is_demo, **more}))


def app_of(launch: Launch) -> DtypeApp:
    """The app as it is launched; what the engine tells is drawn at once, unless the test run says how often (`draw_times`)."""
    app = DtypeApp(launch, lambda emit, _: RecordingEngine(emit))
    draw_times.at_once_unless_told(app.main)
    return app


@asynccontextmanager
async def running(app: DtypeApp, size: tuple[int, int] = (120, 36)) -> AsyncIterator[Pilot[None]]:
    """The app in a terminal of this size, with all its panes."""
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        await app.workers.wait_for_complete()
        await pilot.pause()
        yield pilot


@asynccontextmanager
async def launched(
    *made: Any, size: tuple[int, int] = (120, 36), **more: Any
) -> AsyncIterator[tuple[DtypeApp, Pilot[None]]]:
    """An app as `make_app` makes it, in a terminal of this size, with all its panes."""
    app = make_app(*made, **more)
    async with running(app, size) as pilot:
        yield app, pilot


def engine(app: DtypeApp) -> RecordingEngine:
    assert isinstance(app.controller.engine, RecordingEngine)
    return app.controller.engine


def model_ready(app: DtypeApp) -> events.ModelReady:
    """The engine has opened the model, whose tree is the one that the app knows."""
    return events.ModelReady(app.controller.experiment.tree, "LlamaForCausalLM", "cpu", 1.0, "prompts", ())


async def say(app: DtypeApp, pilot: Pilot[None], *said: events.Event) -> None:
    """The engine says this, and the app takes it in and shows it."""
    for event in said:
        engine(app).emit(event)
    await pilot.pause()
    await pilot.pause()
    await drawn(pilot)


def report(
    recipe: Recipe,
    mean_abs: float = 1.25e-3,
    modules: tuple[ModuleDrift, ...] = (),
    settings: str = "defaults",
    modules_sequences: int = 6,
) -> DriftReport:
    output = OutputDrift(
        elements=100, mean_abs=mean_abs, max_abs=0.5, rel_l2=0.01, sqnr_db=40.0, cosine=0.999, nonfinite=0,
        positions=973, kl_mean=2.5e-4, kl_mean_se=1e-5, top1_agreement=0.98,
        values={"kl_median": 2e-4, "kl_p95": 9e-4, "kl_p99": 1.5e-3, "kl_p999": 2e-3, "kl_max": 3e-3, "top1_agreement_se": 0.004},
    )  # fmt: skip
    rules = tuple(map(str, recipe.rules))
    return DriftReport(
        "demo",
        "cpu",
        "float32",
        rules,
        settings,
        "prompts",
        "logits",
        output,
        modules,
        MemoryStats(),
        Seconds(0.1, 0.2),
        Extent(done=6, total=6, positions=973, of_tokens=True, kl_error=0.0),
        modules_sequences,
    )
