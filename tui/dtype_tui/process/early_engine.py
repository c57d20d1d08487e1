"""The engine's process, started before anything else: torch loads on another core while the screen is painted."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

_WITHOUT = ("-h", "--help", "--version", "--in-process", "--engine-command")
_COMPLETION = "_DTYPE_TUI_COMPLETE"
"""Set by the shell that asks what could follow on the command line."""
_process: subprocess.Popen[bytes] | None = None


def start_early(arguments: Sequence[str]) -> None:
    """Start the engine, where this command line (without the program's name) looks as if it opened a model on this machine.

    One that nobody takes ends when this process does: its input ends then.
    """
    global _process
    if _COMPLETION in os.environ or arguments[:1] == ["serve"]:
        return
    if any(argument.startswith(("ssh://", *_WITHOUT)) for argument in arguments):
        return
    from dtype_engine.worker.connection import COMMAND, start_process

    _process = start_process(COMMAND)


def take() -> subprocess.Popen[bytes] | None:
    """The process that was started, once."""
    global _process
    process, _process = _process, None
    return process
