"""Draw the pictures of the README from the real app, with the real engine on the demo model.

    python screenshots/draw.py [--png] [SCENE ...]

Writes an SVG for each size of each scene, or of those whose names begin so; with `--png` a PNG beside it, to look at (cairosvg, and
a monospaced font). Each scene is drawn by a process of its own, with an engine of its own: a picture tells the memory
of an app that did nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import html
import os
import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from rich.color import Color, ColorSystem
from rich.terminal_theme import DEFAULT_TERMINAL_THEME
from textual.pilot import Pilot

from dtype_engine import Options, Recipe, Rule
from dtype_engine.checkpoint.source import locate
from dtype_engine.service.connection import EngineCommand
from dtype_engine.service.control import Open
from dtype_engine.service.process import EngineProcess
from dtype_tui.app import DtypeApp
from dtype_tui.config.config import Config
from dtype_tui.state.launch import Launch

HERE = Path(__file__).parent
FONTS = "'DejaVu Sans Mono', Menlo, Consolas, monospace"
WAIT_S = 300
_CELL_WIDTH, _CELL_HEIGHT = 12.2, 24.4
"""Of a Textual picture, in its units."""
_BRAILLE_DOTS = ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (1, 3))
"""(column, row) of each bit."""
AS_STORED = Recipe()
MIXED = Recipe(
    (Rule("*", "bfloat16"), Rule("type:LlamaRMSNorm", "float32"), Rule("model.layers.{4..5}.mlp", "float8_e4m3fn"))
)

Scene = Callable[[DtypeApp, "Pilot[None]"], Awaitable[None]]


def demo_app(recipe: Recipe = AS_STORED, config: Config | None = None, begins_tour: bool = False) -> DtypeApp:
    """The app as `dtype-tui demo` opens it."""
    source = locate(None)
    tree, whole = source.peek()
    launch = Launch(
        source.title,
        tree,
        partial=not whole,
        recipe=recipe,
        config=config or Config(),
        is_demo=True,
        begins_tour=begins_tour,
    )
    opening = Open(None, Options(), read_headers=not whole)
    return DtypeApp(launch, lambda emit, wait: EngineProcess(EngineCommand(), opening, emit, wait=wait))


async def until(pilot: Pilot[None], condition: Callable[[], object]) -> None:
    """Wait for the engine."""
    end = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > end:
            raise SystemExit("it never came")
        await pilot.pause(0.02)


async def settled(app: DtypeApp, pilot: Pilot[None]) -> None:
    """Wait until the engine has measured the recipe in force."""
    await until(
        pilot, lambda: app.controller.experiment.results.report is not None and not app.controller.activity.busy
    )
    await pilot.pause(0.3)


async def mix(app: DtypeApp, pilot: Pilot[None]) -> None:
    """A mixed recipe, measured: drift by module, memory, and which rule decides the node."""
    await settled(app, pilot)
    app.main.tree_view.go_to("model.layers.4.mlp")
    await pilot.press("l")


async def cast(app: DtypeApp, pilot: Pilot[None]) -> None:
    """The cast prompt: what the pattern would take is lit up in the tree."""
    await settled(app, pilot)
    app.main.tree_view.go_to("model.layers.2")
    await pilot.press("c", "tab")


async def details(app: DtypeApp, pilot: Pilot[None]) -> None:
    """All that is known of one tensor."""
    await settled(app, pilot)
    app.main.tree_view.go_to("model.layers.4.mlp.up_proj.weight")
    await pilot.press("enter")


async def help_(app: DtypeApp, pilot: Pilot[None]) -> None:
    """The help."""
    await settled(app, pilot)
    await pilot.press("question_mark")


async def flow(app: DtypeApp, pilot: Pilot[None]) -> None:
    """Where dtypes silently change in a forward pass."""
    await settled(app, pilot)
    await pilot.press("f")
    await until(pilot, lambda: len(app.screen_stack) > 1)


async def scan(app: DtypeApp, pilot: Pilot[None]) -> None:
    """How much every weight matters in bf16, in the tree."""
    await settled(app, pilot)
    await pilot.press("s", "enter")
    await until(pilot, lambda: app.controller.experiment.scan.finished and not app.controller.activity.busy)


async def optimise(app: DtypeApp, pilot: Pilot[None]) -> None:
    """The Pareto front, after a scan; a point of it measured."""
    await scan(app, pilot)
    await pilot.press("o")
    await pilot.pause(1)
    await pilot.press(*["left"] * 12)
    await pilot.pause(1)
    await pilot.press("enter")
    await settled(app, pilot)


async def measuring(app: DtypeApp, pilot: Pilot[None]) -> None:
    """Drift module by module, while the candidate's pass goes by."""
    await until(pilot, lambda: len(app.controller.experiment.results.modules) > 20)


async def tour(app: DtypeApp, pilot: Pilot[None]) -> None:
    """A step of the tour: what to press, and why."""
    await settled(app, pilot)
    await pilot.press(*["down"] * 4, "l", "down", "down", "l", "2")
    await settled(app, pilot)


@dataclass(frozen=True)
class View:
    """The terminal that a scene is drawn in."""

    size: tuple[int, int]
    theme: str = "dtype-dark"
    note: str = ""
    """Of what is special about it, for the name of the picture."""
    ascii: str = "never"

    def file(self, scene: str) -> str:
        """The name of the picture, without its ending."""
        return "-".join(part for part in (scene, self.note, f"{self.size[0]}x{self.size[1]}") if part)


SIZES = tuple(View(size) for size in ((60, 15), (80, 24), (120, 36), (200, 50)))
SHADES = (View((120, 36), "dtype-light", "light"), View((120, 36), "ansi-dark", "16-colours"))
NO_COLOUR = (View((80, 24), note="no-colour"),)
FEW_COLOURS = (View((120, 36), note="256-colours"),)
ASCII = (View((80, 24), note="ascii", ascii="always"),)
JOBS: dict[str, tuple[tuple[Scene, Recipe], tuple[View, ...]]] = {
    "mix": ((mix, MIXED), (*SIZES, *SHADES)),
    "cast": ((cast, AS_STORED), SIZES),
    "details": ((details, MIXED), SIZES),
    **{f"flow {view.size[0]}": ((flow, MIXED), (view,)) for view in SIZES},
    "scan": ((scan, AS_STORED), (*SIZES, *SHADES)),
    "optimise": ((optimise, AS_STORED), (*SIZES, *SHADES)),
    "help": ((help_, MIXED), SIZES),
    "tour": ((tour, AS_STORED), SIZES),
    **{f"measuring {view.size[0]}": ((measuring, MIXED), (view,)) for view in SIZES},
    "mix no-colour": ((mix, MIXED), NO_COLOUR),
    "mix 256-colours": ((mix, MIXED), FEW_COLOURS),
    **{f"{name} ascii": (scene, ASCII) for name, scene in (("mix", (mix, MIXED)), ("optimise", (optimise, AS_STORED)))},
}
"""What one process draws, by a name: a scene, and the terminals it is drawn in one after the other. What passes by, and
what is laid out as it is opened, is drawn in one terminal."""


async def draw(name: str, png: bool) -> None:
    """Bring a scene up and draw it in each of its terminals."""
    (scene, recipe), views = JOBS[name]
    if views == NO_COLOUR:
        os.environ["NO_COLOR"] = "1"
    if views == FEW_COLOURS:
        os.environ.pop("COLORTERM", None)
        os.environ["TERM"] = "xterm-256color"
    first = views[0]
    app = demo_app(recipe, Config(first.theme, first.ascii), begins_tour=scene is tour)
    async with app.run_test(size=(120, 36) if len(views) > 1 else first.size) as pilot:
        await scene(app, pilot)
        for view in views:
            app.theme = view.theme
            await pilot.resize_terminal(*view.size)
            await pilot.pause(0.3)
            app.clear_notifications()
            await pilot.pause(0.3)
            picture = plain_picture(app, f"dtype-tui, {view.size[0]} x {view.size[1]}")
            if views == FEW_COLOURS:
                picture = re.sub("#[0-9a-f]{6}", lambda found: nearest_of_256(found[0]), picture)
            file = HERE / view.file(name.partition(" ")[0])
            file.with_suffix(".svg").write_text(picture, encoding="utf-8")
            if png:
                file.with_suffix(".png").write_bytes(as_png(picture))
            print(file.name, flush=True)


def nearest_of_256(colour: str) -> str:
    """The colour, as #rrggbb, that a terminal of 256 colours shows instead."""
    shown = Color.parse(colour).downgrade(ColorSystem.EIGHT_BIT)
    return shown.get_truecolor(DEFAULT_TERMINAL_THEME).hex


def plain_picture(app: DtypeApp, title: str) -> str:
    """What is on the screen as SVG, in fonts of the reader's machine: a picture fetches nothing."""
    picture = app.export_screenshot(title=title)
    picture = re.sub(r"@font-face\s*\{.*?\}", "", picture, flags=re.DOTALL)
    return re.sub(r"font-family:[^;]*;", f"font-family: {FONTS};", picture)


def as_png(picture: str, scale: float = 1.0) -> bytes:
    """An SVG as PNG."""
    import cairosvg

    # It does not stretch text to its length, and this font is narrower than the cells. It takes no second font either, for braille.
    spaced = re.sub(r'<text class="([^"]*)" x="([^"]*)" y="([^"]*)"[^>]*>([^<]*)</text>', _with_dots, picture)
    spaced = spaced.replace("<text ", '<text letter-spacing="0.16" ')
    drawn: bytes = cairosvg.svg2png(bytestring=spaced.encode(), scale=scale)
    return drawn


def _with_dots(text: re.Match[str]) -> str:
    """A text element with its braille as circles, eight to a cell."""
    dots = ""
    for index, character in enumerate(html.unescape(text[4])):
        bits = ord(character) - 0x2800 if 0x2800 < ord(character) < 0x2900 else 0
        for bit, (column, row) in enumerate(_BRAILLE_DOTS):
            if bits >> bit & 1:
                x = float(text[2]) + index * _CELL_WIDTH + (0.25 + 0.5 * column) * _CELL_WIDTH
                y = float(text[3]) - 0.75 * _CELL_HEIGHT + (0.125 + 0.25 * row) * _CELL_HEIGHT
                dots += f'<circle class="{text[1]}" cx="{x:.1f}" cy="{y:.1f}" r="1.6"/>'
    return re.sub("[\u2801-\u28ff]", "\xa0", text[0]) + dots


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--png", action="store_true")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("scenes", nargs="*", default=[""], metavar="SCENE")
    options = parser.parse_args()
    if options.here:
        asyncio.run(draw(options.scenes[0], options.png))
        return
    for name in [name for name in JOBS if name.startswith(tuple(options.scenes))]:
        subprocess.run([sys.executable, __file__, "--here", *(["--png"] if options.png else []), name], check=True)


if __name__ == "__main__":
    main()
