"""An app over a slow line: it draws what the line has room for, where the keys go first."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from rich.color import ColorSystem
from rich.console import RenderableType
from textual import constants, events
from textual._compositor import ChopsUpdate, LayoutUpdate
from textual._context import visible_screen_stack
from textual.app import App, ReturnType
from textual.driver import Driver
from textual.drivers.linux_driver import LinuxDriver
from textual.geometry import Region
from textual.screen import Screen
from textual.strip import Strip
from textual.timer import Timer

from dtype_tui.process.line_pace import JUDGED_AFTER_S, LinePace
from dtype_tui.process.paced_driver import PacedDriver
from dtype_tui.rendering.paced_frames import PacedFrames


class PacedApp(App[ReturnType]):
    """Over a line that takes its time, Textual's frames would queue: a key's answer would come after all that was drawn before it,
    half a minute at 9,600 baud. There a frame only marks what may have changed. A piece of it at a time is written, and the
    terminal asked where its cursor is; the next piece follows the answer. Any other line gets Textual's frames as they are.
    """

    def __init__(self) -> None:
        super().__init__()
        self._frames: PacedFrames | None = None
        """None on a line that is not slow."""
        self._frames_for: LinePace | None = None
        """The pace of the terminal that was drawn on last: another one comes with another start of the driver."""
        self._patience: Timer | None = None

    def get_driver_class(self) -> type[Driver]:
        usual = super().get_driver_class()
        return PacedDriver if usual is LinuxDriver and constants.DRIVER is None else usual

    def _display(self, screen: Screen[object], renderable: RenderableType | None) -> None:
        driver = self._driver
        drawn = self._running and not self._closed and not self._batch_count
        if not (drawn and isinstance(driver, PacedDriver) and isinstance(renderable, ChopsUpdate | LayoutUpdate)):
            super()._display(screen, renderable)
        elif driver.pace.paced:
            self._mark(driver, renderable)
            self._write_piece()
            self.post_display_hook()
        else:
            before, is_drawn = driver.written, self._frames is None
            super()._display(screen, renderable)
            self._frames, self._frames_for = None, driver.pace
            driver.ask_after_frame(driver.written - before)
            if not is_drawn:
                self.screen.refresh()  # the answer by which the line is fast came in the middle of a page

    def _mark(self, driver: PacedDriver, update: ChopsUpdate | LayoutUpdate) -> None:
        size = self.size
        if self._frames is None or self._frames_for is not driver.pace or self._frames.size != size:
            drawn = self._frames is None and self._frames_for is driver.pace
            self._frames = PacedFrames(size, clear=not drawn)
            self._frames_for = driver.pace
            self._stop_waiting()
        if isinstance(update, ChopsUpdate):
            self._frames.mark(update.spans)
        else:
            self._frames.mark((row, 0, size.width) for row in range(size.height))

    def on_cursor_position(self, event: events.CursorPosition) -> None:
        """The terminal shows all that was written."""
        event.stop()
        self._stop_waiting()
        self._write_piece()

    def _write_piece(self) -> None:
        """Write the next piece, unless the last one is still under way."""
        driver, frames = self._driver, self._frames
        if (
            frames is None
            or not isinstance(driver, PacedDriver)
            or not self._running
            or self._closed
            or not self.screen_stack
        ):
            return
        if self._frames_for is not driver.pace:
            return  # the terminal was taken over anew: its first frame is about to come
        if not driver.pace.paced:
            self._frames = None
            self.screen.refresh()
            return
        if driver.pace.waiting and (driver.pace.judged or frames.begun):
            self._wait(driver.pace)
            return
        first = self.focused.region if self.focused is not None else Region()
        piece = frames.piece(self._lines, first, driver.pace.piece(), self._colours)
        if piece:
            row, column = self.cursor_position.y, self.cursor_position.x
            driver.write(f"{piece}\x1b[{row + 1};{column + 1}H")
            driver.ask()
            self._wait(driver.pace)

    def _wait(self, pace: LinePace) -> None:
        if self._patience is None:
            seconds = pace.patience() if pace.judged else JUDGED_AFTER_S
            self._patience = self.set_timer(seconds, partial(self._give_up, pace))

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.stop()
            self._patience = None

    def _give_up(self, pace: LinePace) -> None:
        if not isinstance(self._driver, PacedDriver) or self._driver.pace is not pace:
            return  # the terminal was taken over anew meanwhile
        self._patience = None
        if pace.judged:
            pace.give_up()
        else:
            pace.judge()
        self._write_piece()

    def on_driver_signal_resume(self) -> None:
        """Draw all: terminals clear the screen that they change to. Textual draws only what a new size would change."""
        if self.screen_stack:
            self.screen.refresh()

    @property
    def _colours(self) -> ColorSystem:
        return self.console._color_system or ColorSystem.TRUECOLOR

    def _lines(self, rows: frozenset[int]) -> Mapping[int, Strip]:
        """Lines of the topmost window as they are now."""
        compositor = self.screen._compositor
        visible_screen_stack.set(self._background_screens)
        region = compositor.size.region
        rows = frozenset(row for row in rows if row < region.height)
        if not rows:
            return {}
        crop = Region(0, min(rows), region.width, max(rows) + 1 - min(rows))
        chops = compositor._render_chops(crop, rows.__contains__)
        return {row: Strip.join([strip for strip in chops[row].values() if strip is not None]) for row in rows}
