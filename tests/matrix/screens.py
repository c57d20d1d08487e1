"""The ways to use a model in the app: the real command line, the real worker, keys that a person would press."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tests.helpers import parsed_styles, preloaded, unseen_frames
from textual.events import Paste
from textual.pilot import Pilot

from dtype_engine.cli.program import run
from dtype_engine.service import connection
from dtype_tui.app import DtypeApp
from dtype_tui.cli import command as cli
from dtype_tui.screens.pictures import PicturesScreen

from . import outside
from .commands import BF16, Cell, Refused, check_export, human, known_findings, near, where
from .forms import Made, distinct, entered

unseen_frames.leave_out()
parsed_styles.share()
SIZE = (120, 36)
_PATIENCE_S = 90.0


def app_of(*arguments: str) -> DtypeApp:
    """The app that the command line makes, not yet running. Raises Refused for exit status 2 with its one line. Its engine need not
    import torch.
    """
    made: list[DtypeApp] = []
    said = StringIO()
    engine = connection.EngineCommand(preloaded.command(preloaded.ENGINE))
    with (
        patch.object(connection, "EngineCommand", lambda: engine),
        patch.object(DtypeApp, "run", lambda app, *rest, **more: made.append(app)),
        patch.object(cli, "_need_a_terminal", lambda: None),
        redirect_stderr(said),
    ):
        status = run(cli.command, "dtype-tui", list(arguments))
    if status == 2:
        raise Refused(said.getvalue().strip().removeprefix("dtype-tui: "))
    assert status == 0, said.getvalue()
    return made[0]


def shown(app: DtypeApp) -> str:
    """What stands on the screen."""
    strips = app.screen._compositor.render_strips()
    lines = ["".join(segment.text for segment in strip) for strip in strips][: app.size.height]
    return "\n".join(lines)


def pane(app: DtypeApp, name: str) -> str:
    """The words of one pane, as they stand on the screen."""
    (found,) = (pane for pane in app.main.side.panes if name == pane.TITLE)
    region = found.region
    lines = shown(app).splitlines()[region.y + 1 : region.bottom - 1]
    return " ".join(" ".join(line[region.x + 1 : region.right - 1] for line in lines).split())


async def until(
    pilot: Pilot[None], condition: Callable[[], object], what: str, patience_s: float = _PATIENCE_S
) -> None:
    """Wait for what the engine works out; fails with the screen."""
    app = pilot.app
    assert isinstance(app, DtypeApp)
    end = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < end, f"{what}:\n{shown(app)}"
        await asyncio.sleep(0.05)  # what `pilot.pause` does besides is a message to each widget
    await pilot.pause(0)


@asynccontextmanager
async def opened(made: Made, *more: str) -> AsyncIterator[tuple[DtypeApp, Pilot[None]]]:
    """The app on the model, past opening and the first measurement."""
    given = ("--inputs", str(made.inputs_file)) if made.inputs_file is not None else ()
    app = app_of(*(arguments for arguments in (made.model, *made.options, *given, *more)))
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: ready(app), "the model is not there")
        yield app, pilot
        app.exit()


def ready(app: DtypeApp) -> bool:
    """The engine has nothing to do, and the model, or why there is none, is known."""
    return not app.controller.activity.busy and (
        app.controller.open_error is not None
        or (app.controller.experiment.model.has_tree and app.controller.experiment.model.live)
    )


def _figures(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"\d+\.?\d*(?:e[+-]?\d+)?", text)]


async def _tree(app: DtypeApp, pilot: Pilot[None], made: Made) -> str:
    await until(pilot, lambda: _root(app), "no root on the screen")
    root = _root(app)
    assert human(made.stored_bytes(), 1) in root, root
    assert f" {counted(made.parameters)} params " in shown(app), shown(app)
    return made.loader


def _root(app: DtypeApp) -> str:
    """The line of the root, where the cursor is at first."""
    return next((line for line in shown(app).splitlines() if line.startswith("▌")), "")


def counted(number: int) -> str:
    """A count as the tree writes it, in thousands or millions with one decimal, unless that is 0."""
    if number < 1e3:
        return f"{number:,}"
    divided, unit = (number / 1e6, "M") if number >= 1e6 else (number / 1e3, "k")
    return f"{divided:.1f}".removesuffix(".0") + f" {unit}"


async def _memory(app: DtypeApp, pilot: Pilot[None], made: Made) -> str:
    await until(pilot, lambda: human(made.stored_bytes()) in pane(app, "Memory"), "stored bytes")
    await pilot.press("home", "2")
    await until(pilot, lambda: f"planned {human(made.planned_bytes(BF16))}" in pane(app, "Memory"), "planned")
    await until(pilot, lambda: ready(app), "the cast is not through")
    return made.loader


async def _header(app: DtypeApp, pilot: Pilot[None], made: Made) -> str:
    """The line at the top after the cast: how many bytes less, and a word for the drift of a model that runs."""
    stored, planned = made.stored_bytes(), made.planned_bytes(BF16)
    line = shown(app).splitlines()[0]
    if planned != stored:
        assert f"{100 * abs(planned / stored - 1):.0f} % {'less' if planned < stored else 'more'}" in line, line
    if made.module is not None and made.inputs is not None:
        await until(
            pilot,
            lambda: re.search(" (exact|invisible|small|visible|broken) ", shown(app).splitlines()[0]),
            "no verdict",
        )
    return made.loader


async def _drift(app: DtypeApp, pilot: Pilot[None], made: Made) -> str:
    text = pane(app, "Drift")
    if made.module is None or made.inputs is None:
        assert app.controller.experiment.results.report is None
        assert text.startswith("Drift unknown: "), text
        raise Refused(text)
    await _until_drift(app, pilot, made)
    return "plain torch"


async def _until_drift(app: DtypeApp, pilot: Pilot[None], made: Made) -> None:
    """Wait until the pane has the drift of plain torch. It keeps the figures of the recipe before until the new ones are there."""
    largest, _ = outside.drift(made, BF16)
    await until(
        pilot,
        lambda: any(near(figure, largest, 0.02) for figure in _figures(pane(app, "Drift"))),
        f"max |Δ| is not {largest}",
    )


async def _depth(app: DtypeApp, pilot: Pilot[None], made: Made) -> str:
    """The plot below the tree: the SQNR of the module that drifts most, by plain torch."""
    if made.module is None or made.inputs is None:
        assert not app.main.depth.region
        raise Refused(pane(app, "Drift"))
    await until(pilot, lambda: ready(app), "the measurement is not through")
    worst = app.controller.experiment.results.worst_modules(1)
    text = " ".join(app.main.depth.render_line(y).text for y in range(app.main.depth.size.height))
    if not worst:
        assert "No layer drifts." in text, text
    elif found := re.search(r"▲ .*?(-?\d+\.\d+) dB", text):
        expected = outside.module_sqnr(made, BF16, worst[0].name)
        assert abs(float(found[1]) - expected) < 0.5, (worst[0].name, expected, text)
    return "plain torch"


async def _open(app: DtypeApp, pilot: Pilot[None], key: str) -> None:
    """Open a window by its key. Raises Refused with the notice that the app shows in its place."""
    app.clear_notifications()
    await pilot.press(key)
    await until(pilot, lambda: len(app.screen_stack) > 1 or app._notifications, f"no window and no notice after {key}")
    if len(app.screen_stack) == 1:
        raise Refused(next(iter(app._notifications)).message)


async def _close(app: DtypeApp, pilot: Pilot[None]) -> None:
    title = type(app.screen).__name__
    await pilot.press("escape")
    await until(pilot, lambda: len(app.screen_stack) == 1, f"{title} does not close")


async def _causes(app: DtypeApp, pilot: Pilot[None], made: Made) -> str:
    """`d`: modules of the model, with their shares of the drift of all, which is that of plain torch."""
    await _open(app, pilot, "d")
    await until(pilot, lambda: ready(app) and "alone as cast" in shown(app), "no table of causes", 10 * _PATIENCE_S)
    causes = app.controller.experiment.results.causes
    assert causes is not None
    assert {cause.name for cause in causes.causes} <= dict(made.runs.named_modules()).keys(), causes
    whole = outside.whole_drift(made, BF16, "nats" in causes.unit)
    assert near(causes.whole, whole, 0.05), (whole, causes)
    await _close(app, pilot)
    return "plain torch"


async def _generate(app: DtypeApp, pilot: Pilot[None], made: Made) -> str:
    """`g`: the ids that the float32 model continues its own inputs with."""
    await _open(app, pilot, "g")
    if isinstance(app.screen, PicturesScreen):
        return await _pictures(app, pilot, made)
    await pilot.press("f2", "tab", "ctrl+u", "4", "enter")
    await until(pilot, lambda: ("tokens, " in shown(app) and ready(app)) or _refusal_of(app), "nothing is generated")
    if refusal := _refusal_of(app):
        raise Refused(refusal)
    assert isinstance(app.main.generation.found, tuple)
    made_by = app.main.generation.found[0]
    ids = list(made_by.reference.ids)
    assert ids, made_by
    assert outside.generated(made, 4)[-len(ids) :] == ids
    await _close(app, pilot)
    return "transformers"


async def _pictures(app: DtypeApp, pilot: Pilot[None], made: Made) -> str:
    """`g` of a model that makes pictures: both of them, as plain torch makes them, and how far they are from each other."""
    await until(pilot, lambda: ready(app) and app.controller.experiment.results.report, "no pictures")
    report = app.controller.experiment.results.report
    assert report is not None
    pictures = [
        outside.call(module, made.inputs, dtype).clamp(0, 1)
        for module, dtype in ((made.runs, torch.float32), (outside.in_dtype(made.runs, BF16), BF16))
    ]
    pair = report.pictures[0]
    for found, expected in zip((pair.reference, pair.candidate), pictures, strict=True):
        pixels = torch.frombuffer(bytearray(found.pixels), dtype=torch.uint8).reshape(found.height, found.width, 3)
        assert (pixels.double() - 255 * expected[0].movedim(0, -1)).abs().max() <= 1
    psnr = -10 * math.log10(float((pictures[1] - pictures[0]).square().mean()))
    text = shown(app)
    assert any(abs(figure - psnr) < 0.05 for figure in _figures(text)), (psnr, text)
    assert "▀" in text, text
    await _close(app, pilot)
    return "diffusers"


async def _values(app: DtypeApp, pilot: Pilot[None], made: Made) -> str:
    """`v` on the largest tensor that can be cast: the error of a cast to 16 bits, by plain torch."""
    castable = distinct(made.castable)
    # What is in bfloat16 already has no row of it: the error of a cast to float16 is looked at instead, which is none.
    name = max(castable, key=lambda name: (castable[name].dtype != BF16, castable[name].numel()))
    target = "f16" if castable[name].dtype == BF16 else "bf16"
    before = pane(app, "Drift")
    assert app.main.tree_view.go_to(name), name
    try:
        await _open(app, pilot, "v")
    except Refused:
        assert pane(app, "Drift") == before, "a refusal took a reading off the screen"
        raise
    wide = castable[name].float()
    largest = float((wide.double() - wide.to(torch.float16 if target == "f16" else BF16).double()).abs().max())
    await until(pilot, lambda: _row_of(app, target), f"no row of {target}")
    row = _row_of(app, target)
    figures = _figures(row)
    assert any(near(figure, largest, 0.02) for figure in figures), (largest, row)
    await _close(app, pilot)
    return made.loader


def _row_of(app: DtypeApp, dtype: str) -> str:
    """The line of a dtype in the table of casts, "" while it is not drawn."""
    rows = (line for line in shown(app).splitlines() if re.search(rf"│ {dtype} .*(dB|exact)", line))
    return next(rows, "")


async def _export(app: DtypeApp, pilot: Pilot[None], made: Made, work: Path) -> str:
    target = work / "from-the-app"
    app.clear_notifications()
    await pilot.press("e")
    await until(pilot, lambda: len(app.screen_stack) > 1, "nothing to leave with")
    await pilot.press("ctrl+u")
    assert app.focused is not None
    app.focused.post_message(Paste(str(target)))  # not key by key: Pilot waits 60 ms after each
    await until(pilot, lambda: getattr(app.focused, "value", "") == str(target), "the folder is not in the field")
    await pilot.press("enter")
    await until(pilot, lambda: target.exists() or _refusal_of(app), "nothing is written")
    if not target.exists():
        raise Refused(_refusal_of(app))
    await until(pilot, lambda: ready(app), "the export does not end")
    check_export(made, target)
    return "safetensors.torch.load_file"


async def _check(app: DtypeApp, pilot: Pilot[None], made: Made) -> str:
    app.clear_notifications()
    await pilot.press("colon", *"check", "enter")
    await until(pilot, lambda: "Check of the model's files" in shown(app) or _refusal_of(app), "no check")
    if refusal := _refusal_of(app):
        raise Refused(refusal)
    known = known_findings(made)
    text = shown(app)
    assert ("No problems were found." if not known else f"{len(known)} finding") in text, text
    assert all(name in text for _, name in known), text
    await _close(app, pilot)
    return made.loader


def _refusal_of(app: DtypeApp) -> str:
    """What was said against it, in a notice or in the window."""
    said = [notice.message for notice in app._notifications if notice.severity in ("warning", "error")]
    return said[-1] if said else ""


async def walk(ways: Sequence[str], made: Made, work: Path) -> dict[str, Cell | str]:
    """These cells of the app, in one run of the app and in another that takes it up: what each came to, or what went wrong."""
    cells: dict[str, Cell | str] = {}

    async def fill(name: str, step: Callable[[], Coroutine[Any, Any, str]]) -> None:
        if name not in ways:
            return
        try:
            cells[name] = Cell(oracle=await step())
        except Refused as error:
            cells[name] = Cell(refusal=str(error))
        except Exception as error:
            cells[name] = where(error)

    work.mkdir(parents=True, exist_ok=True)
    with entered(made):
        async with opened(made) as (app, pilot):
            steps: dict[str, Callable[[], Coroutine[Any, Any, str]]] = {
                "app: tree": lambda: _tree(app, pilot, made),
                "app: Memory": lambda: _memory(app, pilot, made),
                "app: header": lambda: _header(app, pilot, made),
                "app: Drift": lambda: _drift(app, pilot, made),
                "app: depth": lambda: _depth(app, pilot, made),
                "app: d": lambda: _causes(app, pilot, made),
                "app: g": lambda: _generate(app, pilot, made),
                "app: v": lambda: _values(app, pilot, made),
                "app: e": lambda: _export(app, pilot, made, work),
                "app: :check": lambda: _check(app, pilot, made),
            }
            for name, step in steps.items():
                await fill(name, step)
                if len(app.screen_stack) > 1:
                    await pilot.press("escape")
            rules, cursor = app.controller.experiment.recipe, app.main.tree_view.current.name
        await fill("app: --resume", lambda: _resume(made, rules, cursor))
        await fill("app: O", lambda: _over(made))
    return cells


async def _over(made: Made) -> str:
    """`O`: the model is larger than the memory to use, and then runs from the disk. Raises Refused with what is said instead."""
    limit = ("--max-memory", f"cpu={made.stored_bytes() // 2}")
    async with opened(made, "--cast", "*=bfloat16", *limit) as (app, pilot):
        await until(pilot, lambda: app.controller.open_error is not None, "it opens")
        app.clear_notifications()
        await pilot.press("O")
        await asyncio.sleep(1)  # where it can't run, the same sentence may stand there again
        await until(pilot, lambda: ready(app), "it does not open")
        if not app.controller.experiment.model.live:
            raise Refused(said(app))
        await _until_drift(app, pilot, made)
    return "plain torch"


def said(app: DtypeApp) -> str:
    """Why the model does not run, as a notice or in the place of the drift."""
    return _refusal_of(app) or str(app.controller.open_error or "")


async def _resume(made: Made, rules: Any, cursor: str) -> str:
    async with opened(made, "--resume") as (app, pilot):
        assert app.controller.experiment.recipe == rules
        # The app adds no rule that changes nothing.
        assert [str(rule) for rule in rules.rules] == ["*=bfloat16"][
            : any(tensor.dtype != BF16 for tensor in made.castable.values())
        ]
        assert app.main.tree_view.current.name == cursor
        planned = f"planned {human(made.planned_bytes(BF16))}"
        await until(pilot, lambda: planned in pane(app, "Memory"), "planned bytes")
        await pilot.press("u")
        await until(pilot, lambda: not app.controller.experiment.recipe.rules, "undo does not go back")
    return made.loader


AT_FIRST = (
    "app: tree", "app: Memory", "app: header", "app: Drift", "app: depth", "app: d", "app: g", "app: v", "app: e", "app: :check",
)  # fmt: skip
"""The ways in the first run of the app, each of which needs what those before it have brought about."""
SCREENS = (*AT_FIRST, "app: --resume", "app: O")
