"""Starts the engine's process before anything else, so that torch is imported on another core while the screen is painted."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress

_WITHOUT = ("-h", "--help", "--version", "--in-process", "--engine-command")
"""Options with which no engine process on this machine is needed."""
_COMPLETION = "_DTYPE_TUI_COMPLETE"
"""An environment variable that the shell sets when it asks for completions."""
_process: subprocess.Popen[bytes] | None = None


def start_early(arguments: Sequence[str]) -> None:
    """Start the engine's process if the command line probably opens a model on this machine. If the engine is not used, it ends
    when this process ends, because that closes the engine's input.
    """
    global _process
    if _COMPLETION in os.environ or arguments[:1] == ["serve"]:
        return
    if any(argument.startswith(("ssh://", *_WITHOUT)) for argument in arguments):
        return
    from dtype_engine.service.connection import COMMAND, start_process

    _process = start_process(COMMAND)
    from dtype_engine.service.stdio import NICENESS

    with suppress(OSError):  # it may have ended
        # The engine does this itself, but only after imports that would delay the first paint if all cores are busy.
        os.setpriority(os.PRIO_PROCESS, _process.pid, NICENESS)


def take() -> subprocess.Popen[bytes] | None:
    """Return the process that `start_early` started, or None if it started none or an earlier call has returned it."""
    global _process
    process, _process = _process, None
    return process
