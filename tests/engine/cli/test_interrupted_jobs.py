"""Jobs that a signal interrupts: nothing is left but after SIGKILL, and what continues ends with the same figures."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests.engine.cli.interrupted_jobs import interrupt, undisturbed
from tests.helpers import preloaded


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "number"),
    [
        ("drift", signal.SIGKILL),
        ("scan", signal.SIGTERM),
        ("over memory", signal.SIGQUIT),
    ],
    ids=str,
)
def test_job_interrupted_while_it_saves_leaves_nothing_and_continues_to_the_same_figures(
    job: str, number: signal.Signals, tmp_path: Path
) -> None:
    """`make engine-deaths` has all jobs and signals."""
    assert interrupt(job, number, "saving", tmp_path, undisturbed(job)) == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked from a server on Linux only")
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL], ids=lambda number: number.name)
def test_signal_during_a_scan_with_workers_leaves_no_traceback_and_no_folder(
    number: signal.Signals, tmp_path: Path
) -> None:
    """A terminal and a batch system send their signals to all processes of a command. SIGKILL ends the first one only."""
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
