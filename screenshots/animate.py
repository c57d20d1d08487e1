"""Draw the moving picture at the top of the README: the real app and engine on the demo model, from opening it to the front.

    python screenshots/animate.py

Writes an animated WebP; what waits for the engine is shortened. It needs cairosvg and a monospaced font on this machine.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from pathlib import Path

from draw import as_png, demo_app, plain_picture, until
from PIL import Image
from textual.pilot import Pilot

from dtype_tui.app import DtypeApp

FILE = Path(__file__).with_name("demo.webp")
SIZE = (120, 32)
SCALE = 0.8
LARGEST = 2_000_000
"""Bytes; a README is read over slow lines, too."""
_WAITING_MS = 300


class Film:
    """Pictures of an app, and how long each stands."""

    def __init__(self, app: DtypeApp, pilot: Pilot[None]) -> None:
        self.app = app
        self.pilot = pilot
        self._svgs: list[str] = []
        self._stands_ms: list[int] = []

    async def take(self, milliseconds: int) -> None:
        """What is on the screen now stands so long; longer where it is what stood before."""
        await self.pilot.pause(0.15)
        self.app.clear_notifications()
        await self.pilot.pause(0.05)
        svg = plain_picture(self.app, "dtype-tui demo")
        if self._svgs and self._svgs[-1] == svg:
            self._stands_ms[-1] += milliseconds
        else:
            self._svgs.append(svg)
            self._stands_ms.append(milliseconds)

    async def press(self, *keys: str, stands: int) -> None:
        """Press keys, a picture after each."""
        for key in keys:
            await self.pilot.press(key)
            await self.take(stands)

    async def wait(self, condition: Callable[[], object], every_s: float, most: int) -> None:
        """A picture now and then, so many at most, until the engine is done."""
        for _ in range(most):
            if condition():
                break
            await self.take(_WAITING_MS)
            await self.pilot.pause(every_s)
        await until(self.pilot, condition)

    def save(self, file: Path) -> None:
        """Write the film."""
        # Drawn in full and made smaller: drawn small, letters are set off from their cells.
        drawn = [Image.open(io.BytesIO(as_png(svg))).convert("RGB") for svg in self._svgs]
        size = round(drawn[0].width * SCALE), round(drawn[0].height * SCALE)
        images = [image.resize(size, Image.Resampling.LANCZOS) for image in drawn]
        images[0].save(
            file, save_all=True, append_images=images[1:], duration=self._stands_ms, loop=0, lossless=True, method=6,
            minimize_size=True,
        )  # fmt: skip
        seconds = sum(self._stands_ms) / 1000
        print(f"{file.name}: {len(images)} pictures, {seconds:.0f} s, {file.stat().st_size:,} bytes")
        if file.stat().st_size > LARGEST:
            raise SystemExit(f"larger than {LARGEST:,} bytes: leave out pictures")


async def play() -> Film:
    """Open, cast, go to the worst, scan, walk the front."""
    app = demo_app()
    experiment, activity = app.controller.experiment, app.controller.activity
    async with app.run_test(size=SIZE) as pilot:
        film = Film(app, pilot)
        await film.wait(lambda: experiment.results.report is not None and not activity.busy, 1.0, 5)
        await film.take(1200)
        await film.press(*["down"] * 4, stands=180)
        await film.press("c", "tab", stands=1100)
        await film.press("enter", stands=300)
        await film.wait(lambda: experiment.results.report is not None, 0.3, 5)
        await film.take(1800)
        await film.press("w", stands=1500)
        await until(pilot, lambda: not activity.busy)
        await film.press("s", stands=1200)
        await film.press("enter", stands=300)
        await film.wait(lambda: experiment.scan.finished and not activity.busy, 1.0, 6)
        await film.take(1200)
        await pilot.press("o")
        await pilot.pause(1)
        await film.take(1200)
        for _ in range(8):
            await pilot.press("left", "left")
            await film.take(220)
        await pilot.pause(0.5)
        await film.take(800)
        await film.press("enter", stands=300)
        await film.wait(lambda: experiment.results.report is not None and not activity.busy, 0.5, 4)
        await film.take(3000)
        return film


if __name__ == "__main__":
    asyncio.run(play()).save(FILE)
