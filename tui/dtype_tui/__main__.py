"""Where `dtype-tui` begins: the engine's process is started before anything else is imported."""

from __future__ import annotations

import os
import sys

from dtype_tui.process.early_engine import start_early
from dtype_tui.process.ending import exit_at_once
from dtype_tui.process.gc_policy import pause_gc

_SWITCH_S = 0.001
"""How long a thread that reads what the engine tells may keep a key waiting, each time: Python's own 5 ms add up to 30."""
_FRAMES_A_SECOND = 120
"""A key right after a frame waits for the next one: 17 ms at Textual's own 60."""


def main() -> None:
    """The `dtype-tui` program."""
    os.environ.setdefault("TEXTUAL_FPS", str(_FRAMES_A_SECOND))  # Textual reads it when it is imported
    sys.setswitchinterval(_SWITCH_S)
    pause_gc()
    start_early(sys.argv[1:])
    from dtype_tui.cli.main import main as run

    try:
        run()
    except SystemExit as end:
        exit_at_once(end.code)


if __name__ == "__main__":
    main()
