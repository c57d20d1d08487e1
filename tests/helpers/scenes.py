"""Every screen of the app, brought up by keys and by events fed by hand: the same each time, whatever the machine."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from tests.helpers.recording_engine import make_app, report, running, say
from textual.pilot import Pilot
from textual.widgets import Input

from dtype_engine.core.options import RunSettings
from dtype_engine.core.tree import Tree
from dtype_engine.recipe import Recipe, Rule, tensor_bytes
from dtype_engine.results.attribution import AttributionReport, Contribution, NoiseFloor
from dtype_engine.results.drift import NATS, Extent, ImplicitCastStats, ModuleDrift, PartialDrift
from dtype_engine.results.execution import ExecutionReport, ExecutionRow
from dtype_engine.results.inputs import InputBatch, InputsSummary, InputTensor
from dtype_engine.results.memory import MemoryStats
from dtype_engine.results.pictures import Picture, PicturePair
from dtype_engine.results.runs import Generation, SpeedReport, SpeedRow, Written
from dtype_engine.results.scan import ScanReport, WeightScore
from dtype_engine.results.token_choices import TextChoices, TokenReport
from dtype_engine.results.weights import ExponentHistogram, WeightError, WeightStats
from dtype_engine.service import events
from dtype_engine.service.jobs import (
    CAUSES,
    EXECUTIONS,
    FLOOR,
    FLOW,
    GENERATE,
    SPEED,
    TOKENS,
    VALUES,
    GenerateText,
    InspectTensor,
)
from dtype_engine.service.save_requests import ExportPlan
from dtype_tui.app import DtypeApp
from dtype_tui.widgets.module_tree import ModuleTree

Scene = Callable[[DtypeApp, "Pilot[None]"], Awaitable[None]]
MIXED = Recipe(
    (Rule("*", "bfloat16"), Rule("*norm*", "float32"), Rule("model.layers.{4..5}.mlp", "float8_e4m3fn"))
)  # fmt: skip
DOWN = "model.layers.1.mlp.down_proj"
MIB = 1 << 20


def modules() -> tuple[ModuleDrift, ...]:
    """Drift that grows with depth, the MLPs ahead."""
    found = []
    for layer in range(6):
        parts = {"self_attn": 0.0, "mlp": 4.0, "mlp.gate_proj": 1.0, "mlp.up_proj": 2.0, "mlp.down_proj": 4.5}
        for part, less in parts.items():
            found.append(ModuleDrift(f"model.layers.{layer}.{part}", 58.0 - 5 * layer - less, 1e-3 * (layer + 1), 0))
        found.append(ModuleDrift(f"model.layers.{layer}", 55.0 - 5 * layer, 2e-3 * (layer + 1), 0))
    return tuple(found)


def memory() -> MemoryStats:
    return MemoryStats(
        stored_bytes=int(2.7 * MIB), planned_bytes=int(1.2 * MIB), resident_bytes=int(1.21 * MIB),
        resident_by_device=(("cpu", int(1.21 * MIB)),), rss_bytes=440 * MIB, anonymous_bytes=322 * MIB,
        mapped_bytes=int(2.71 * MIB), peak_rss_bytes=452 * MIB,
    )  # fmt: skip


async def ready(app: DtypeApp, pilot: Pilot[None]) -> None:
    """The model is there and nothing is cast."""
    tree = app.controller.experiment.tree
    inputs = "6 default prompts, 973 tokens"
    loaded = events.ModelReady(tree, "LlamaForCausalLM", "cpu", 1.0, inputs, (), loader="transformers")
    await say(app, pilot, loaded)
    await say(app, pilot, events.Memory(app.controller.experiment.recipe, memory()), events.Idle())


@asynccontextmanager
async def opened(
    scene: Scene = ready, size: tuple[int, int] = (120, 36), tree: Tree | None = None, **launch: Any
) -> AsyncIterator[tuple[DtypeApp, Pilot[None]]]:
    """The app in a scene, in a terminal of this size; the rest as `make_app` has it."""
    app = make_app(tree, **launch)
    async with running(app, size) as pilot:
        await scene(app, pilot)
        yield app, pilot


async def mixed(app: DtypeApp, pilot: Pilot[None]) -> None:
    """A mixed recipe, measured."""
    await ready(app, pilot)
    app.controller.apply_recipe(MIXED)
    await say(app, pilot, events.Memory(MIXED, memory()))
    await say(app, pilot, events.Measured(MIXED, report(MIXED, 1.64e-2, modules())), events.Idle())
    floor = NoiseFloor(("eager attention",), 256, 128.0, 1e-5, 1e-7, 9e-13, 1.0)
    await say(app, pilot, events.JobDone(None, FLOOR.ask(None), floor))
    app.query_one(ModuleTree).go_to("model.layers.4.mlp")
    await pilot.press("l")


async def measuring(app: DtypeApp, pilot: Pilot[None]) -> None:
    await ready(app, pilot)
    app.controller.apply_recipe(MIXED)
    await say(app, pilot, events.Jobs("measure", ()), events.MeasuringProgress(MIXED, "candidate", 150, 300))
    await say(app, pilot, events.ModulesMeasured(MIXED, modules()[:14]))


async def queued(app: DtypeApp, pilot: Pilot[None]) -> None:
    """A measurement runs, and a scan and an export wait."""
    await measuring(app, pilot)
    await say(app, pilot, events.Jobs("measure", ("scan", "write")))


async def measured_in_part(app: DtypeApp, pilot: Pilot[None]) -> None:
    """Under way, with the figures of the first two of six sequences."""
    await measuring(app, pilot)
    extent = Extent(done=2, total=6, positions=295, of_tokens=True, rel_l2_error=0.05, kl_error=0.11)
    reading = PartialDrift(report(MIXED).output, extent)
    kept = dataclasses.replace(memory(), kept_bytes=31 * MIB, kept_budget_bytes=2 * 1024 * MIB)
    await say(app, pilot, events.OutputMeasured(MIXED, RunSettings(), reading), events.Memory(MIXED, kept))


def after(scene: Scene, *keys: str) -> Scene:
    async def bring_up(app: DtypeApp, pilot: Pilot[None]) -> None:
        await scene(app, pilot)
        await pilot.press(*keys)
        await pilot.pause()

    return bring_up


def with_event(scene: Scene, event: Callable[[DtypeApp], events.Event], *keys: str) -> Scene:
    """The scene after an event of the engine, and then after keys."""

    async def bring_up(app: DtypeApp, pilot: Pilot[None]) -> None:
        await scene(app, pilot)
        await say(app, pilot, event(app), events.Idle())
        await pilot.press(*keys)
        await pilot.pause()

    return bring_up


async def failed(app: DtypeApp, pilot: Pilot[None]) -> None:
    await ready(app, pilot)
    await pilot.press("3")
    words = "model.layers.3.mlp: linear has no float16 kernel on cpu; bfloat16 works there (not implemented for 'Half')"
    await say(app, pilot, events.Failed(app.controller.experiment.recipe, words, "model.layers.3.mlp"), events.Idle())
    app.clear_notifications()


async def history(app: DtypeApp, pilot: Pilot[None]) -> None:
    await mixed(app, pilot)
    for place, rules in enumerate(("*=bfloat16", "*=float16", "*.mlp=float8_e4m3fn")):
        recipe = Recipe((Rule.parse(rules),))
        app.controller.experiment.push(recipe)
        measured = report(recipe, 1e-3 * (place + 1), modules())
        output = dataclasses.replace(measured.output, kl_mean=10.0 ** -(3 + place))
        await say(app, pilot, events.Measured(recipe, dataclasses.replace(measured, output=output)), events.Idle())
    await pilot.press("H")
    await pilot.pause()


def flow(app: DtypeApp) -> events.Event:
    casts = (
        ImplicitCastStats("model.layers.1.mlp.up_proj", "linear", "float32", "float64", 12288, 1, True),
        ImplicitCastStats("model.layers.4.mlp.gate_proj", "linear", "bfloat16", "float32", 98304, 6, True),
        ImplicitCastStats("model.norm", "mul", "bfloat16", "float32", 12288, 12, False),
    )
    return events.JobDone(app.controller.experiment.recipe, FLOW.ask(None), casts)


def generated(app: DtypeApp) -> events.Event:
    texts = (
        "    def run(self):\n        return self._run()\n",
        "    def run(self):\n        pass\n\n    def stop(self):\n",
    )
    both = [Written(tuple(map(ord, text)), tuple(text), 0.5) for text in texts]
    found = Generation("class Worker:\n", *both)
    return events.JobDone(app.controller.experiment.recipe, GENERATE.ask(GenerateText(48)), (found,))


async def generating(app: DtypeApp, pilot: Pilot[None]) -> None:
    await mixed(app, pilot)
    await pilot.press("g", "f2", *"class Worker:", "enter")
    await say(app, pilot, generated(app), events.Idle())
    await pilot.pause()


def token_choices(app: DtypeApp) -> events.Event:
    pieces = ("    def", " run", "(self", "):\n", "        return", " self", ".", "_run", "()", "\n")
    others = {1: (" stop", 0.84, "different"), 4: ("        pass", 0.011, "tie"), 7: ("run", 2.4, "different")}
    written = Written(tuple(range(10)), pieces, 0.5)
    text = TextChoices(
        "class Worker:\n", written, tuple(50 if at in others else at for at in range(10)),
        tuple(others[at][0] if at in others else pieces[at] for at in range(10)),
        tuple(others[at][1] if at in others else 0.0 for at in range(10)),
        tuple(others[at][2] if at in others else "identical" for at in range(10)),  # type: ignore[arg-type]
    )  # fmt: skip
    floor = NoiseFloor(("eager attention", "batch of two"), 256, 128.0, 1e-5, 1e-7, 9e-13, 1.0, 0.0156)
    report = TokenReport("demo", "cpu", ("*=bfloat16",), "your prompt", (text,), 0.0156, floor)
    return events.JobDone(app.controller.experiment.recipe, TOKENS.ask(GenerateText(48)), report)


async def comparing_tokens(app: DtypeApp, pilot: Pilot[None]) -> None:
    await mixed(app, pilot)
    await pilot.press("g", *"class Worker:", "enter")
    await say(app, pilot, token_choices(app), events.Idle())
    await pilot.pause()


def picture(share: float) -> Picture:
    """A gradient whose red part grows with `share`, from 0 to 1."""
    pixels = [(round(255 * share), 4 * x, 8 * y) for y in range(24) for x in range(48)]
    return Picture(48, 24, bytes(each for pixel in pixels for each in pixel))


async def pictures(app: DtypeApp, pilot: Pilot[None]) -> None:
    """The pictures of two inputs."""
    await mixed(app, pilot)
    measured = report(MIXED, 1.64e-2, modules())
    output = dataclasses.replace(measured.output, kl_mean=None, values={"psnr_db": 31.25, "ssim": 0.912})
    pairs = tuple(PicturePair(picture(share), picture(1 - share)) for share in (0.2, 0.4))
    await say(app, pilot, events.Measured(MIXED, dataclasses.replace(measured, output=output, pictures=pairs)))
    await pilot.press("g")
    await pilot.pause()
    await pilot.pause()


def timed(app: DtypeApp) -> events.Event:
    rows = (
        SpeedRow("reference", "f32", 0.5, 0.4, 0.6, 5, 2000.0, False),
        SpeedRow("as stored", "f32", 0.5, 0.4, 0.6, 5, 2000.0, False),
        SpeedRow("candidate", "f32 + bf16", 2.0, 1.9, 2.1, 5, 500.0, True),
    )
    times = SpeedReport("demo", "cpu", 2, (), "6 default prompts", rows)
    return events.JobDone(app.controller.experiment.recipe, SPEED.ask(None), times)


def executions(app: DtypeApp) -> events.Event:
    moved = app.controller.experiment.results.report
    assert moved is not None
    rows = (
        ExecutionRow("attention=eager", moved.output, "model.layers.0.self_attn.o_proj"),
        ExecutionRow("threads=1", dataclasses.replace(moved.output, max_abs=0.0)),
        ExecutionRow("decode=yes", None, why_not="decode=yes runs inputs of tokens alone"),
    )
    report = ExecutionReport("demo", "cpu", (), "6 default prompts", rows)
    return events.JobDone(app.controller.experiment.recipe, EXECUTIONS.ask(None), report)


def values(app: DtypeApp) -> events.Event:
    name = "model.embed_tokens.weight"
    counts = tuple((power, max(1, 40_000 - 400 * (power + 5) ** 2)) for power in range(-15, 4))
    errors = tuple(
        WeightError(name, "float32", dtype, 98_304, error, 20 * error, 30 * error, decibels, 0, 0, 0, 12, 0)
        for dtype, error, decibels in (("bfloat16", 1e-4, 55.9), ("float16", 1e-5, 73.9), ("float8_e4m3fn", 1e-3, 31.5))
    )
    found = WeightStats(ExponentHistogram(name, counts, 7, 0), errors)
    return events.JobDone(app.controller.experiment.recipe, VALUES.ask(InspectTensor(name, ())), found)


def inputs(app: DtypeApp) -> events.Event:
    rows = tuple(
        InputBatch(f"{text}…", tokens, (InputTensor("input_ids", (1, tokens), "int64"),))
        for text, tokens in (("import os", 162), ("class Worker:", 170), ("def main() -> None:", 141))
    )
    made_of = ("text: the demo's own prompts",)
    return events.InputsReady(InputsSummary("3 default prompts, 473 tokens", made_of, 473, rows))


def exported(app: DtypeApp) -> events.Event:
    mix = (("bfloat16", 43, 528_384), ("float8_e4m3fn", 6, 221_184), ("float32", 13, 4_992))
    loading = "from_pretrained would make all of it bfloat16; dtype_engine.load_pretrained keeps every dtype."
    return events.ExportPlanned(app.controller.experiment.recipe, ExportPlan(754_560, 1, mix, loading, ()))


def causes(app: DtypeApp) -> events.Event:
    parts = (
        Contribution(DOWN, 1, 1.24e-4, 0.62, 41.0),
        Contribution("model.layers.2.mlp.up_proj", 1, 2.6e-5, 0.13, 52.0),
    )
    found = AttributionReport("demo", ("*=bfloat16",), "nats per token", 2e-4, 1.5e-4, 256, 60, 1.0, parts)
    return events.JobDone(app.controller.experiment.recipe, CAUSES.ask(None), found)


def scanned(app: DtypeApp) -> events.Event:
    weights = []
    dtypes = ("bfloat16", "float8_e4m3fn", "int8")
    for place, (name, tensor) in enumerate(app.controller.experiment.tree.tensors.items(), 1):
        for dtype, scale in (("float32", 0.0), ("bfloat16", 1e-7), ("float8_e4m3fn", 3e-5), ("int8", 1e-6)):
            score = (place * 37 % 41) * scale
            weights.append(WeightScore(name, dtype, tensor_bytes(tensor, dtype), score, score / 10))
    about = "demo", "cpu", "float32", app.controller.experiment.model.inputs, NATS, False
    return events.ScanUpdated(ScanReport(*about, 4, 6, 6, dtypes, 1.0, 15.0, tuple(weights)), True)


SCENES: dict[str, Scene] = {
    "as-stored": ready,
    "mix": mixed,
    "measuring": measuring,
    "measured in part": measured_in_part,
    "failed": failed,
    "memory-tab": after(mixed, "tab"),
    "recipe-tab": after(mixed, "tab", "tab"),
    "cast-prompt": after(ready, "j", "j", "j", "c", "tab"),
    "filter": after(mixed, "slash", *"up_proj"),
    "command-line": after(ready, "colon", *"cast *.mlp b", "tab"),
    "help": after(ready, "question_mark"),
    "details": after(mixed, "enter"),
    "settings": after(ready, "comma"),
    "flow": with_event(mixed, flow),
    "generation": generating,
    "tokens": comparing_tokens,
    "pictures": pictures,
    "speed": with_event(mixed, timed),
    "executions": with_event(mixed, executions),
    "values": with_event(ready, values),
    "inputs": with_event(ready, inputs, "i"),
    "presets": after(ready, "p"),
    "leave": with_event(after(mixed, "e"), exported),
    "causes": with_event(after(mixed, "d"), causes),
    "history": history,
    "compared": after(history, "j", "P", "escape"),
    "scan-dtypes": after(ready, "s"),
    "heat": with_event(ready, scanned),
    "scan": with_event(ready, scanned, "s"),
    "optimise": with_event(ready, scanned, "o"),
    "jobs": after(queued, "J"),
    "labels": after(mixed, "semicolon"),
    "folded": after(ready, *["down"] * 4, "2"),
}


async def bring_up(name: str, app: DtypeApp, pilot: Pilot[None]) -> None:
    """A scene, still and without passing notices."""
    await SCENES[name](app, pilot)
    for field in app.screen.query(Input):
        field.cursor_blink = False
    await pilot.pause(0.1)  # a front is solved in a thread, 0.05 s after the last key
    app.clear_notifications()
    await pilot.pause()


__all__ = ["SCENES", "bring_up", "make_app"]
