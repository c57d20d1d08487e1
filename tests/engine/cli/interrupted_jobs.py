"""Jobs that signals or a full disk interrupt. Nothing is left but after SIGKILL, and what continues ends with the same result.

`python -m tests.engine.cli.interrupted_jobs 20` interrupts each job this many times at random moments and prints what it saw. As
root on Linux, it also runs each job as often on a disk that is too small for it. `... 20 7 drift scan` takes another seed than 1,
and these jobs only.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers import preloaded
from tests.helpers.hub_server import hub_of

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL)
ENDED_BEFORE, CONTINUED = "ended before the signal", "interrupted and continued to the same result"
_TIMES = frozenset({"seconds", "forward_seconds", "scan_seconds", "memory"})


def figures(folder: Path, text: str) -> Any:
    """The figures in a command's JSON output, without times and memory."""

    def without_times(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without_times(each) for key, each in value.items() if key not in _TIMES}
        return [without_times(each) for each in value] if isinstance(value, list) else value

    return without_times(json.loads(text))


def files(folder: Path, text: str) -> dict[str, str]:
    """The digests of all files that a command wrote."""
    found = (path for path in folder.rglob("*") if path.is_file() and not path.name.endswith((".lock", ".partial")))
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


@dataclass(frozen=True)
class Job:
    """A command that writes to a folder."""

    arguments: tuple[str, ...]
    """The command, in which FOLDER stands for the folder."""
    result: Callable[[Path, str], Any] = figures
    """What the command comes to, from its folder and its output."""
    kept: tuple[str, ...] = ("saved.json",)
    """The names in the folder that may be left."""
    of_hub: bool = False

    def command(self, folder: Path) -> list[str]:
        return [argument.replace("FOLDER", str(folder)) for argument in self.arguments]


_SAVES = ("--json", "--save", "FOLDER/saved.json")
JOBS = {
    "drift": Job(("drift", "--cast", "*.mlp=int8", *_SAVES)),
    "scan": Job(("scan", "--dtypes", "int8", *_SAVES)),
    "search": Job(("search", "--dtypes", "int8", "--budget", "60%", *_SAVES)),
    "over memory": Job(("drift", "--cast", "*.mlp=int8", "--over-memory", "--max-memory", "cpu=2MB", *_SAVES)),
    "export": Job(("export", "--cast", "*.mlp=int8", "--force", "-o", "FOLDER/out"), files, ("out",)),
    "download": Job(("inspect", "hf://org/name", "--download"), files, ("hub", "dtype-tui"), of_hub=True),
}

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
Throttle.due = lambda self, *_, **__: True  # saves after every sequence
from dtype_engine.cli import main
main()
"""


def run_job(job: Job, folder: Path, number: int = 0, when: str = "") -> subprocess.CompletedProcess[str]:
    """Run a job, with a signal at a moment if `number` is not 0. when: a number of seconds, or "saving"."""
    with hub_with_a_model(folder) if job.of_hub else nullcontext():
        return preloaded.run(_PROGRAM, str(number), when, *job.command(folder))


@contextmanager
def hub_with_a_model(folder: Path) -> Iterator[None]:
    """Run a slow hub with an export of the built-in model, whose cache is `folder`."""
    with hub_of(folder, org__name=Path(_exported().name) / "model") as hub:
        hub.delay_s = 0.05
        yield


@functools.cache
def _exported() -> tempfile.TemporaryDirectory[str]:
    made = tempfile.TemporaryDirectory()
    preloaded.run(_PROGRAM, "0", "", "export", "--cast", "*=bf16", "-o", f"{made.name}/model")
    return made


def undisturbed(name: str) -> Any:
    """What a job comes to that nothing interrupts."""
    with tempfile.TemporaryDirectory() as folder:
        done = run_job(JOBS[name], Path(folder))
        assert done.returncode == 0, done.stderr
        return JOBS[name].result(Path(folder), done.stdout)


def interrupt(name: str, number: signal.Signals, when: str, folder: Path, expected: Any) -> list[str]:
    """Run a job that writes to `folder`, with a signal at a moment, and then again without one. Returns what was wrong, or
    `ENDED_BEFORE`. when: a number of seconds, or "saving".
    """
    done = run_job(JOBS[name], folder, int(number), when)
    killed = number == signal.SIGKILL
    found = []
    if done.returncode == 0:
        found.append(ENDED_BEFORE)
    elif done.returncode != (-number if killed else 128 + number):
        found.append(f"status {done.returncode}: {done.stderr}")
    return found + _left(JOBS[name], folder, done.stderr, killed) + _continued(JOBS[name], folder, expected)


def fill_the_disk(name: str, kilobytes: int, folder: Path, expected: Any) -> list[str]:
    """Run a job on a disk of this size, and then again on a larger one. Returns what was wrong, or `ENDED_BEFORE`. Takes root."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", folder], check=True)
    try:
        done = run_job(JOBS[name], folder)
        found = [ENDED_BEFORE] if done.returncode == 0 and not done.stderr else []
        if done.returncode not in (0, 2) or len(done.stderr.strip().splitlines()) > 3:
            found.append(f"status {done.returncode} on a full disk: {done.stderr}")
        found += _left(JOBS[name], folder, done.stderr, killed=False)
        subprocess.run(["mount", "-o", "remount,size=64m", folder], check=True)
        return found + _continued(JOBS[name], folder, expected)
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def _left(job: Job, folder: Path, said: str, killed: bool) -> list[str]:
    left = {entry.name for entry in folder.iterdir()} - set(job.kept)
    left |= {path.name for path in folder.rglob("*.incomplete")}
    wrong = {name for name in left if not (killed and (".partial" in name or name.endswith(".incomplete")))}
    return [said] * ("Traceback" in said) + [f"left {wrong}"] * bool(wrong)


def _continued(job: Job, folder: Path, expected: Any) -> list[str]:
    again = run_job(job, folder)
    if again.returncode != 0:
        return [f"continued with status {again.returncode}: {again.stderr}"]
    for path in folder.rglob("*.incomplete"):
        path.unlink()  # of a download that was killed; the hub's library removes them later
    for entry in folder.iterdir():
        if ".partial" in entry.name:
            subprocess.run(["rm", "-r", str(entry)], check=True)
    return [] if job.result(folder, again.stdout) == expected else ["continued to another result"]


def main(count: int, seed: int, names: Sequence[str]) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # small models on several threads only wait
    for number in SIGNALS[:-1]:  # in the background of a script, a process ignores some of them, and so would the jobs
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    chance = random.Random(seed)
    wrong = 0
    for name in names:
        expected = undisturbed(name)  # the first run of all also starts the server from which programs are forked
        before = time.monotonic()
        undisturbed(name)
        whole = time.monotonic() - before
        seen = Counter[str]()
        while seen.total() - seen[ENDED_BEFORE] < count:
            number = SIGNALS[(seen.total() - seen[ENDED_BEFORE]) % len(SIGNALS)]
            with tempfile.TemporaryDirectory() as folder:
                found = interrupt(name, number, str(chance.uniform(0.02, whole)), Path(folder), expected)
            if found == [ENDED_BEFORE]:
                whole *= 0.9  # it was slower when it was timed
            seen.update(found or [CONTINUED])
        wrong += seen.total() - seen[ENDED_BEFORE] - seen[CONTINUED]
        print(name, *(f"{times} x {what}" for what, times in seen.items()), sep="\n  ", flush=True)
        wrong += full_disks(name, count, chance, expected) if sys.platform == "linux" and os.geteuid() == 0 else 0
    return min(wrong, 1)


def full_disks(name: str, count: int, chance: random.Random, expected: Any) -> int:
    """Run a job on this many disks that are too small. Returns how many times something was wrong."""
    seen, most = Counter[str](), 4096
    while seen.total() - seen[ENDED_BEFORE] < count:
        with tempfile.TemporaryDirectory() as folder:
            found = fill_the_disk(name, chance.randrange(4, most, 4), Path(folder), expected)
        if found == [ENDED_BEFORE]:
            most = max(8, most * 2 // 3)
        seen.update(found or ["full disk said, and continued to the same result"])
    print(*(f"  {times} x {what}" for what, times in seen.items()), sep="\n", flush=True)
    return sum(times for what, times in seen.items() if what != ENDED_BEFORE and not what.startswith("full disk"))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1, sys.argv[3:] or list(JOBS)))
