"""Draw the pictures of the README from the real app, with the real engine on the demo model.

    python screenshots/draw.py [--png] [SCENE ...]

Writes an SVG for each scene, or for those whose names begin so; with `--png` a PNG beside it, to look at (cairosvg, and a
monospaced font on this machine).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from textual.pilot import Pilot

from dtype_engine import Options, Recipe, Rule
from dtype_engine.checkpoint.source import locate
from dtype_engine.worker.worker import Worker
from dtype_tui.app import DtypeApp
from dtype_tui.config.config import Config
from dtype_tui.widgets.module_tree import ModuleTree

HERE = Path(__file__).parent
FONTS = "'DejaVu Sans Mono', Menlo, Consolas, monospace"
MIXED = Recipe(
    (Rule("*", "bfloat16"), Rule("type:LlamaRMSNorm", "float32"), Rule("model.layers.{4..5}.mlp", "float8_e4m3fn"))
)

AS_STORED = Recipe()

Scene = Callable[[DtypeApp, "Pilot[None]"], Awaitable[None]]


async def settle(app: DtypeApp, pilot: Pilot[None]) -> None:
    """Wait until the engine has measured the recipe in force."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        await pilot.pause(0.1)
        if app.experiment.report is not None and not app.busy:
            return
    raise SystemExit("the engine did not finish")


async def mix(app: DtypeApp, pilot: Pilot[None]) -> None:
    """A mixed recipe, measured: drift by module, memory, and which rule decides the node."""
    app.query_one(ModuleTree).go_to("model.layers.4.mlp")
    await pilot.press("l")
    await settle(app, pilot)


async def cast(app: DtypeApp, pilot: Pilot[None]) -> None:
    """The cast prompt: what the pattern would take is lit up in the tree."""
    app.query_one(ModuleTree).go_to("model.layers.2")
    await settle(app, pilot)
    await pilot.press("c", "tab")
    await pilot.pause(0.3)


async def details(app: DtypeApp, pilot: Pilot[None]) -> None:
    """All that is known of one tensor."""
    app.query_one(ModuleTree).go_to("model.layers.4.mlp.up_proj.weight")
    await settle(app, pilot)
    await pilot.press("enter")
    await pilot.pause(0.3)


async def help_(app: DtypeApp, pilot: Pilot[None]) -> None:
    """The help."""
    await settle(app, pilot)
    await pilot.press("question_mark")
    await pilot.pause(0.3)


async def flow(app: DtypeApp, pilot: Pilot[None]) -> None:
    """Where dtypes silently change in a forward pass."""
    await settle(app, pilot)
    await pilot.press("f")
    await until(pilot, lambda: len(app.screen_stack) > 1)


async def scanned(app: DtypeApp, pilot: Pilot[None]) -> None:
    """How much every weight matters in bf16, in the tree."""
    await settle(app, pilot)
    await pilot.press("s", "enter")
    await until(pilot, lambda: app.experiment.scan.finished and not app.busy)


async def optimise(app: DtypeApp, pilot: Pilot[None]) -> None:
    """The Pareto front, after a scan."""
    await scanned(app, pilot)
    await pilot.press("o")
    await pilot.pause(1)
    await pilot.press(*["left"] * 12)
    await pilot.pause(1)


async def measuring(app: DtypeApp, pilot: Pilot[None]) -> None:
    """Drift module by module, while the candidate's pass goes by."""
    await until(pilot, lambda: len(app.experiment.modules) > 20)


async def until(pilot: Pilot[None], condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not condition():
        if time.monotonic() > end:
            raise SystemExit("it never came")
        await pilot.pause(0.02)


_SCENES: dict[str, tuple[Scene, Recipe]] = {
    "mix": (mix, MIXED),
    "measuring": (measuring, MIXED),
    "cast": (cast, AS_STORED),
    "details": (details, MIXED),
    "flow": (flow, MIXED),
    "scan": (scanned, AS_STORED),
    "optimise": (optimise, AS_STORED),
    "help": (help_, MIXED),
}
_SIZES = ((80, 24), (120, 36), (200, 50))
SCENES = {
    f"{name}-{size[0]}x{size[1]}": (scene, recipe, size, "textual-dark")
    for name, (scene, recipe) in _SCENES.items()
    for size in _SIZES
} | {
    f"{name}-{shade}-120x36": (*_SCENES[name], (120, 36), theme)
    for name in ("mix", "scan", "optimise")
    for shade, theme in (("light", "textual-light"), ("16-colours", "ansi-dark"))
}


async def draw(name: str, scene: Scene, recipe: Recipe, size: tuple[int, int], theme: str, png: bool) -> None:
    source = locate(None)
    checkpoint = source.open()
    assert checkpoint is not None
    app = DtypeApp(source.title, checkpoint.tree(), lambda emit: Worker(source, Options(), emit), config=Config(theme))
    app.start_with(recipe)
    async with app.run_test(size=size) as pilot:
        await scene(app, pilot)
        app.clear_notifications()
        await pilot.pause(0.2)
        picture = app.export_screenshot(title=f"dtype-tui, {size[0]} x {size[1]}")
    # Fonts are those of the reader's machine: a picture fetches nothing.
    picture = re.sub(r"@font-face\s*\{.*?\}", "", picture, flags=re.DOTALL)
    picture = re.sub(r"font-family:[^;]*;", f"font-family: {FONTS};", picture)
    (HERE / f"{name}.svg").write_text(picture, encoding="utf-8")
    if png:
        import cairosvg

        # It does not stretch text to its length, and this font is narrower than the cells.
        picture = picture.replace("<text ", '<text letter-spacing="0.16" ')
        cairosvg.svg2png(bytestring=picture.encode(), write_to=str(HERE / f"{name}.png"))
    print(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--png", action="store_true")
    parser.add_argument("scenes", nargs="*", default=[""], metavar="SCENE")
    options = parser.parse_args()
    for name, (scene, recipe, size, theme) in SCENES.items():
        if not name.startswith(tuple(options.scenes)):
            continue
        asyncio.run(draw(name, scene, recipe, size, theme, options.png))
        # The next picture tells the memory of this process, and an app takes nothing for garbage that was there before it.
        gc.unfreeze()
        gc.collect()


if __name__ == "__main__":
    main()
