"""Jobs that a signal interrupts: nothing is left but after SIGKILL, and what continues ends with the same figures."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.helpers import preloaded

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL]
TIMES = frozenset({"seconds", "forward_seconds", "scan_seconds"})

# The last argument but those of the command is the number of a signal, which the program sends itself after the first sequence is
# saved and while the second file is being written; 0 sends none.
ENDING = """
import os, sys
from dtype_engine.core import atomic_write
number, ready, before = int(sys.argv.pop(1)), [], os.fsync
def fsync(file):
    ready.append(file)
    if number and len(ready) == 3:  # a file and its folder are flushed for each write
        os.kill(os.getpid(), number)
    before(file)
os.fsync = fsync
from dtype_engine.core.throttle import Throttle
Throttle.due = lambda self: True  # saves after every sequence
from dtype_engine.cli import main
main()
"""
JOBS = {
    "drift": ["drift", "--cast", "*.mlp=int8"],
    "scan": ["scan", "--dtypes", "int8"],
    "search": ["search", "--dtypes", "int8", "--budget", "60%"],
    "over memory": ["drift", "--cast", "*.mlp=int8", "--over-memory", "--max-memory", "cpu=2MB"],
}


def figures(value: Any) -> Any:
    """Return a result without times and memory."""
    if isinstance(value, dict):
        return {key: figures(each) for key, each in value.items() if key not in TIMES and key != "memory"}
    return [figures(each) for each in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def undisturbed() -> Callable[[str], Any]:
    """A function that returns the figures of a job that nothing interrupts."""
    known: dict[str, Any] = {}

    def of(job: str) -> Any:
        if job not in known:
            known[job] = figures(json.loads(preloaded.run(ENDING, "0", *JOBS[job], "--json").stdout))
        return known[job]

    return of


@pytest.mark.slow
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("job", JOBS)
def test_interrupted_job_leaves_nothing_and_continues_to_the_same_figures(
    job: str, number: signal.Signals, tmp_path: Path, undisturbed: Callable[[str], Any]
) -> None:
    command = [*JOBS[job], "--json", "--save", str(tmp_path / "saved.json")]
    done = preloaded.run(ENDING, str(int(number)), *command)
    assert done.stdout == ""
    names = {entry.name for entry in tmp_path.iterdir()}
    if number == signal.SIGKILL:
        assert done.returncode == -signal.SIGKILL
        assert {name for name in names if not name.startswith(".saved.json.partial-")} == {"saved.json"}
    else:
        assert done.returncode == 128 + number, done.stderr
        assert "Traceback" not in done.stderr
        assert names == {"saved.json"}
    continued = preloaded.run(ENDING, "0", *command)
    assert continued.returncode == 0, continued.stderr
    assert figures(json.loads(continued.stdout)) == undisturbed(job)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked from a server on Linux only")
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL], ids=lambda number: number.name)
def test_signal_during_a_scan_with_workers_leaves_no_traceback_and_no_folder(
    number: signal.Signals, tmp_path: Path
) -> None:
    """A terminal sends its signals to all processes of a command. SIGKILL ends the first one only."""
    program = subprocess.Popen(
        [sys.executable, "-c", preloaded.COMMAND, "scan", "--exact", "--workers", "2"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        start_new_session=True,
    )
    process = psutil.Process(program.pid)
    deadline = time.monotonic() + 120
    # A tracker of semaphores, what names a file that was cut short, a server, and two workers that the server forks.
    while len(started := process.children(recursive=True)) < 5:
        assert program.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert [entry.name.startswith("pymp-") for entry in tmp_path.iterdir()].count(True) == 1
    time.sleep(1.0)
    if number == signal.SIGKILL:
        program.kill()
    else:
        os.killpg(program.pid, number)
    _, said = program.communicate(timeout=120)
    assert program.returncode == (-number if number == signal.SIGKILL else 128 + number)
    if number == signal.SIGKILL:
        assert b"Traceback" not in said  # Python's tracker says how many semaphores it removes
    else:
        assert said.decode().strip() == f"dtype-engine: interrupted by {number.name}"
    psutil.wait_procs(started, 60)
    assert [entry for entry in tmp_path.iterdir() if entry.name.startswith("pymp-")] == []
    with contextlib.suppress(psutil.NoSuchProcess):
        assert not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in started)
