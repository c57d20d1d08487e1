"""Jobs that signals interrupt. Nothing is left but after SIGKILL, and what continues ends with the same figures.

`python -m tests.engine.cli.interrupted_jobs 20` interrupts each job this many times at random moments and prints what it saw.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.helpers import preloaded

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL)
JOBS = {
    "drift": ("drift", "--cast", "*.mlp=int8"),
    "scan": ("scan", "--dtypes", "int8"),
    "search": ("search", "--dtypes", "int8", "--budget", "60%"),
    "over memory": ("drift", "--cast", "*.mlp=int8", "--over-memory", "--max-memory", "cpu=2MB"),
}
ENDED_BEFORE, CONTINUED = "ended before the signal", "interrupted and continued to the same figures"
_TIMES = frozenset({"seconds", "forward_seconds", "scan_seconds", "memory"})

# Its first arguments are the number of a signal that the program sends itself, 0 for none, and when: after so many seconds or, if
# that is "saving", after the first sequence is saved and while the second file is being written.
_PROGRAM = """
import os, sys, threading
number, when = int(sys.argv.pop(1)), sys.argv.pop(1)
def end():
    os.kill(os.getpid(), number)
if number and when != "saving":
    timer = threading.Timer(float(when), end)
    timer.daemon = True
    timer.start()
from dtype_engine.core import atomic_write
ready, before = [], os.fsync
def fsync(file):
    ready.append(file)
    if number and when == "saving" and len(ready) == 3:  # a file and its folder are flushed for each write
        end()
    before(file)
os.fsync = fsync
from dtype_engine.core.throttle import Throttle
Throttle.due = lambda self: True  # saves after every sequence
from dtype_engine.cli import main
main()
"""


def figures(text: str) -> Any:
    """The figures in a command's JSON output, without times and memory."""

    def without_times(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without_times(each) for key, each in value.items() if key not in _TIMES}
        return [without_times(each) for each in value] if isinstance(value, list) else value

    return without_times(json.loads(text))


def undisturbed(job: str) -> Any:
    """The figures of a job that nothing interrupts."""
    return figures(preloaded.run(_PROGRAM, "0", "", *JOBS[job], "--json").stdout)


def interrupt(job: str, number: signal.Signals, when: str, folder: Path, expected: Any) -> list[str]:
    """Run a job that saves in `folder`, with a signal at a moment, and then again without one. Returns what was wrong, or
    `ENDED_BEFORE`. when: a number of seconds, or "saving".
    """
    command = (*JOBS[job], "--json", "--save", str(folder / "saved.json"))
    done = preloaded.run(_PROGRAM, str(int(number)), when, *command)
    left = {entry.name for entry in folder.iterdir()} - {"saved.json"}
    killed = number == signal.SIGKILL
    found = []
    if done.returncode == 0:
        found.append(ENDED_BEFORE)
    elif done.returncode != (-number if killed else 128 + number):
        found.append(f"status {done.returncode}: {done.stderr}")
    if "Traceback" in done.stderr:
        found.append(done.stderr)
    if {name for name in left if not (killed and name.startswith(".saved.json.partial-"))}:
        found.append(f"left {left}")
    continued = preloaded.run(_PROGRAM, "0", "", *command)
    if continued.returncode != 0:
        found.append(f"continued with status {continued.returncode}: {continued.stderr}")
    elif figures(continued.stdout) != expected:
        found.append("continued to other figures")
    return found


def main(count: int, seed: int) -> int:
    chance = random.Random(seed)
    wrong = 0
    for job in JOBS:
        expected = undisturbed(job)  # the first run of all also starts the server from which programs are forked
        before = time.monotonic()
        undisturbed(job)
        whole = time.monotonic() - before
        seen = Counter[str]()
        while seen.total() - seen[ENDED_BEFORE] < count:
            number = SIGNALS[(seen.total() - seen[ENDED_BEFORE]) % len(SIGNALS)]
            with tempfile.TemporaryDirectory() as folder:
                found = interrupt(job, number, str(chance.uniform(0, whole)), Path(folder), expected)
            if found == [ENDED_BEFORE]:
                whole *= 0.9  # it was slower when it was timed
            seen.update(found or [CONTINUED])
        wrong += seen.total() - seen[ENDED_BEFORE] - seen[CONTINUED]
        print(job, *(f"{times} x {what}" for what, times in seen.items()), sep="\n  ", flush=True)
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1))
