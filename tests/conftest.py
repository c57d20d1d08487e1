"""No test touches the state folder of whoever runs it: sessions go to a folder of the test run's own. Tests have one thread each,
and so have the programs they start: their models are so small that several threads would only wait for each other, which takes a
processor as well.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import shlex
import shutil
import signal
import tempfile
from collections.abc import Callable, Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from tests.helpers import measured_on, preloaded
from tests.helpers.paths import ROOT

from dtype_tui.state.first_start import note_start

if "PYTEST_XDIST_WORKER" not in os.environ:
    preloaded.share()
_state = tempfile.TemporaryDirectory(prefix="dtype-tui-state-")
atexit.register(_state.cleanup)
os.environ["XDG_STATE_HOME"] = _state.name
note_start()  # the line for who never started it is tested by itself
os.environ.setdefault("OMP_NUM_THREADS", "1")
measured_on.use()
os.environ["TORCH_COMPILE_DISABLE"] = "1"  # what compressed-tensors compiles takes a C++ compiler
# With Python's own thresholds a tenth of the processor's time goes to collections over what torch and pytest keep for good.
gc.set_threshold(20_000, 20, 20)
# Started by nohup, or in the background of a script, a process ignores these, and so do the programs that it starts.
_HANDLERS = (
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGINT, signal.default_int_handler),
)
for number, handler in _HANDLERS:
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)

hypothesis.settings.register_profile("no deadline", deadline=None)  # how long an example takes is the machine's
hypothesis.settings.register_profile("many examples", deadline=None, max_examples=5000)
hypothesis.settings.load_profile("no deadline")

_OPEN_FILES, _MANY_FILES = Path("/proc/self/fd"), 400
_MODEL_FIXTURES = {"make_llama", "tinynet", "recorded", "net"}
"""Fixtures that make a model or run the worker: the first in a process imports torch and transformers, five seconds."""


@pytest.fixture(autouse=True)
def no_saved_statistics() -> None:
    """Begin without the statistics of roundings that an earlier test has saved: whether a model is run does not depend on them."""
    shutil.rmtree(Path(_state.name, "dtype-tui", "statistics"), ignore_errors=True)


@pytest.fixture(autouse=True)
def few_open_files() -> Generator[None]:
    """Free models of earlier tests, of which each has a file open for every weight, before `select` can take no more files."""
    yield
    if _OPEN_FILES.is_dir() and len(os.listdir(_OPEN_FILES)) > _MANY_FILES:
        gc.collect()


_LONG = ("tests/tui/test_workers.py", "tests/test_manual.py", "tests/terminal/")
"""Where tests take ten seconds and more."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return the number of processes for `-n auto`: three more than there are cores, since tests in a terminal mostly wait for a
    screen.
    """
    return (os.cpu_count() or 1) + 3


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Fork each process of a run from one that has imported what the tests need, unless its lines are counted from the start."""
    if not config.getoption("cov_source", None):
        python = shlex.join(preloaded.command("import sys; exec(eval(sys.stdin.readline()))"))  # what execnet would run
        specs[:] = [type(spec)(f"popen//python={python}") for spec in specs]


def pytest_collection(session: pytest.Session) -> None:
    """Import another share of the tests first in each process of a run: what one has compiled, the others read."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        number, count = int(os.environ["PYTEST_XDIST_WORKER"][2:]), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        roots = [Path(argument.partition("::")[0]).resolve() for argument in session.config.args]
        files = [file for root in roots for file in (sorted(root.rglob("test_*.py")) if root.is_dir() else [root])]
        for file in files[number::count]:
            # A file that skips itself, because an optional package is missing, says so when pytest collects it.
            with suppress(pytest.skip.Exception):
                importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))


def pytest_sessionfinish() -> None:
    """Keep pytest's five collections at its end from going through all that the tests have left in memory."""
    gc.collect()  # what raises an error while it is taken apart still does
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Skip a test that failed because an accelerator does not support an operation and raised the error expected for it."""
    try:
        return (yield)
    except Exception as error:
        if (reason := measured_on.refused(error)) is None:
            raise
        pytest.skip(f"only on another device: {reason}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_turns([item.nodeid.partition("::")[0] for item in items]))
    measured_on.leave_out(items)
    for item in items:
        if _MODEL_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker("slow")


def _turns(files: list[str]) -> Callable[[pytest.Item], float]:
    """Return a key that sorts tests: those of long files first, so that no process is waited for at the end; then files of tests
    that mostly wait for a screen, each between files that compute, so that a core always has work. files: each test's.
    """
    waiting = [file.startswith("tests/tui/") for file in files]
    turns: dict[str, float] = {}
    for group in (False, True):
        of_group = [file for file, waits in zip(files, waiting, strict=True) if waits is group]
        for place, file in enumerate(of_group):
            turns.setdefault(file, -1 if file.startswith(_LONG) else place / len(of_group))
    return lambda item: turns[item.nodeid.partition("::")[0]]
