"""Runs `dtype-engine` for one call of an agent, and ends with the server that started it, even if that was killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress

from dtype_engine.cli import main as run_command

_SECONDS_TO_END = 1.0


def main() -> None:
    """Run the command line. Standard input is a pipe to which the server writes nothing, and which ends with the server."""
    end_with_pipe(_SECONDS_TO_END)
    run_command()


def end_with_pipe(seconds: float) -> None:
    """End this process as SIGTERM does when the pipe on standard input ends, or abruptly if that takes more than `seconds`. The
    command itself finds standard input empty.
    """
    pipe, nothing = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def wait() -> None:
        with suppress(OSError):
            while os.read(pipe, 4096):
                pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(seconds)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=wait, name="end with the server", daemon=True).start()
