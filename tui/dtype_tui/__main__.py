"""Entry point of `dtype-tui`. It starts the engine's process before it imports anything else."""

from __future__ import annotations

import gc
import os
import sys

from dtype_tui.process.early_engine import start_early

_SWITCH_S = 0.001
"""Python's thread switch interval in seconds. At the default of 5 ms, the thread that reads events delays a key by 30 ms."""
_FRAMES_A_SECOND = 120
"""Frame rate. The response to a key waits for the next frame: up to 8 ms at this rate, 17 ms at Textual's default of 60."""


def main() -> None:
    os.environ.setdefault("TEXTUAL_FPS", str(_FRAMES_A_SECOND))  # Textual reads this when it is imported
    sys.setswitchinterval(_SWITCH_S)
    gc.disable()  # `resume_gc` turns it on again
    start_early(sys.argv[1:])
    from dtype_tui.cli.main import main as run

    try:
        run()
    except SystemExit as end:
        _exit(end.code)


def _exit(status: str | int | None) -> None:
    """End the process. If torch was imported, skip the interpreter's shutdown, which would abort the process if a thread that used
    torch is still ending. status: as for `sys.exit`.
    """
    if "torch" not in sys.modules or isinstance(status, str):
        sys.exit(status)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(status or 0)


if __name__ == "__main__":
    main()
