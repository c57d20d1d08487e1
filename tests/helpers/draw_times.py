"""When an app under test shows what its engine tells, and when it hears of it: `DTYPE_TUI_TEST_DRAW_EVERY_S` and
`DTYPE_TUI_TEST_EVENT_EVERY_S`, in seconds. A test must pass with any: it waits for what it asserts.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from dtype_engine.service.events import Event
from dtype_tui.main_screen import MainScreen
from dtype_tui.state.event_queue import EventQueue

DRAW_EVERY_S = "DTYPE_TUI_TEST_DRAW_EVERY_S"
EVENT_EVERY_S = "DTYPE_TUI_TEST_EVENT_EVERY_S"

Emit = Callable[[Event], None]


def use() -> None:
    """Let every app in this process draw as often as the environment says; where it says nothing, as often as for users."""
    if DRAW_EVERY_S in os.environ:
        MainScreen.draw_every_s = float(os.environ[DRAW_EVERY_S])


def at_once_unless_told(main: MainScreen) -> None:
    """Let this app draw at once, unless the environment says how often."""
    if DRAW_EVERY_S not in os.environ:
        main.draw_every_s = 0.0


def apart(emit: Emit) -> Emit:
    """What passes events on one by one, as far apart as the environment says; `emit` itself where it says nothing. Of events that
    replace each other only the newest waits, as on a slow connection.
    """
    if EVENT_EVERY_S not in os.environ:
        return emit
    every_s, arrived = float(os.environ[EVENT_EVERY_S]), threading.Semaphore(0)
    waiting = EventQueue(arrived.release)

    def pass_on() -> None:
        while arrived.acquire():
            time.sleep(every_s)
            if (event := waiting.take()) is not None:
                emit(event)

    threading.Thread(target=pass_on, daemon=True).start()
    return waiting.put
