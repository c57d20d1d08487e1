"""`python slow_line.py FOLDER SECONDS COMMAND ...`: COMMAND behind a line that takes so long each way.

FOLDER gets `pid` (of the line; killing it cuts the line), `up` and `down` (how many bytes went to and came from the command). While
there is a file `down-for-now` in it, nobody gets through.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.helpers.terminal import Terminal


def carry(source: int, target: int, seconds: float, count: Path) -> threading.Thread:
    """Copy bytes from a file descriptor to another, each so much later, and note how many there were."""
    waiting: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

    def take() -> None:
        while data := os.read(source, 1 << 16):
            waiting.put((time.monotonic() + seconds, data))
        waiting.put((time.monotonic() + seconds, b""))

    def give() -> None:
        total = 0
        while True:
            due, data = waiting.get()
            time.sleep(max(0.0, due - time.monotonic()))
            if not data:
                os.close(target)
                return
            total += len(data)
            count.with_suffix(".new").write_text(str(total))
            count.with_suffix(".new").replace(count)
            while data:
                data = data[os.write(target, data) :]

    threading.Thread(target=take, daemon=True).start()
    thread = threading.Thread(target=give, daemon=True)
    thread.start()
    return thread


def carried(folder: Path) -> tuple[int, int]:
    """Bytes that went to the command and came from it."""
    return int((folder / "up").read_text()), int((folder / "down").read_text())


def settled(terminal: Terminal, folder: Path) -> tuple[int, int]:
    """The bytes once nothing has gone either way for two seconds, while the terminal is read."""
    now, since = carried(folder), time.monotonic()
    while time.monotonic() - since < 2:
        terminal.read(0.1)
        if (newer := carried(folder)) != now:
            now, since = newer, time.monotonic()
    return now


def look_around(terminal: Terminal, folder: Path) -> tuple[int, int]:
    """Wait until the demo is measured, and press keys that need no engine; the bytes before, which stay so."""
    terminal.wait_for("perplexity")
    terminal.wait_for(" ready")
    before = settled(terminal, folder)
    for keys in ("jjjk", "hl", "E", "/mlp", "\x1b", "\x1b", "c", "*norm*=f1", "\x1b"):
        terminal.press(keys)
        time.sleep(0.4)  # Esc and a key right after it are one key
        terminal.read()
    assert carried(folder) == before, "the cursor, folding, the filter or a preview made traffic"
    return before


def measure_over_a_cut(terminal: Terminal, folder: Path, cut: Callable[[], object]) -> None:
    """Cast, and cut the line while the engine measures: the figures are there once it is mended."""
    (folder / "down-for-now").touch()
    terminal.press("2")
    terminal.wait_for("casting|measuring")
    time.sleep(0.5)
    cut()
    terminal.wait_for("connection cut: trying again")
    (folder / "down-for-now").unlink()
    terminal.wait_for("connected again")
    terminal.wait_for(r"\* +bf16|bf16")
    terminal.wait_for(" ready")
    terminal.wait_for(r"SQNR +\d+\.\d")


def cut(folder: Path) -> None:
    """Cut the line."""
    os.kill(int((folder / "pid").read_text()), signal.SIGKILL)


def main() -> None:
    folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
    if (folder / "down-for-now").exists():
        sys.exit("ssh: connect to host far port 22: No route to host")
    (folder / "pid").write_text(str(os.getpid()))
    child = subprocess.Popen(sys.argv[3:], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    assert child.stdin is not None
    assert child.stdout is not None
    carry(0, child.stdin.fileno(), seconds, folder / "up")
    carry(child.stdout.fileno(), 1, seconds, folder / "down").join()
    os._exit(child.wait())


if __name__ == "__main__":
    main()
