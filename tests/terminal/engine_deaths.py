"""The engine dies while it loads, measures, scans and exports, by each signal that a crash may be, in a real pseudo-terminal.

`python -m tests.terminal.engine_deaths` goes through all sixteen, four in each program: the screen has to say what happened, to
answer keys without an engine, and to be where it was once R has started another. The terminal has to be as it was in the end.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from tests.helpers import preloaded
from tests.helpers.terminal import Terminal

from dtype_engine.service.connection import COMMAND
from dtype_tui.state.session_store import read_session

# Python's report of a crash may crash itself while modules are imported, so the engine that is loading is killed in the test run.
SIGNALS = (signal.SIGKILL, signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT)
WORDS = {  # one each: sentences are broken between words
    signal.SIGBUS: "SIGBUS",
    signal.SIGKILL: "killed",
    signal.SIGSEGV: "crashed",
    signal.SIGABRT: "crashed",
}
NONE = "no engine: R starts it again"
# Making it and each layer take as long as a file beside it says; what an export writes is large enough to be met on its way.
_NET = """
import os, time
from pathlib import Path
import torch
from torch import nn

SECONDS = Path(__file__).with_name("seconds")
Path(__file__).with_name("engine").write_text(str(os.getpid()))

class Layer(nn.Linear):
    def forward(self, x):
        time.sleep(float(SECONDS.read_text()))
        return super().forward(x).relu()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        time.sleep(float(SECONDS.read_text()))
        self.layers = nn.Sequential(*(Layer(64, 64) for _ in range(12)))
        self.unused = nn.Parameter(torch.zeros(4096, 4096))
    def forward(self, x):
        return self.layers(x)

def example_inputs():
    return (torch.linspace(-1, 1, 256).reshape(4, 64),)
"""


class Deaths:
    """The program in a terminal, on a model in `folder`, whose engine dies once in each of its states.

    The first engine is started as the program does it; those after it are forked from a process that has imported torch.
    """

    def __init__(self, folder: Path, size: tuple[int, int] = (120, 36), seconds: float = 0) -> None:
        self._folder = folder
        (folder / "net.py").write_text(_NET)
        self.slow(seconds)
        state = {"XDG_STATE_HOME": str(folder / "state")}
        engine = preloaded.after(COMMAND, preloaded.ENGINE, folder / "started")
        self.terminal = Terminal(
            f"{folder}/net.py:Net", "--cast", "*=bf16", size=size, environment=state, engine=engine
        )

    def slow(self, seconds: float) -> None:
        """Let each layer take this long."""
        (self._folder / "new").write_text(str(seconds))
        (self._folder / "new").replace(self._folder / "seconds")

    def engine(self) -> psutil.Process:
        """Return the process that has imported the model, or that will import it."""
        if (file := self._folder / "engine").exists():
            return psutil.Process(int(file.read_text()))
        (child,) = psutil.Process(self.terminal.pid).children()
        return child

    def _dies(self, number: signal.Signals, rules: str) -> None:
        """Send the signal to the engine. The screen must say what happened, answer a key, and keep the rules."""
        engine, terminal = self.engine(), self.terminal
        engine.send_signal(number)
        with contextlib.suppress(psutil.NoSuchProcess):
            engine.resume()  # where it was halted
        terminal.wait_for(re.escape(WORDS[number]), 20)
        terminal.wait_for(number.name, 20)
        terminal.wait_for(NONE, 20)
        terminal.press("?")
        terminal.wait_for("Stop and leave", 20)
        terminal.press("\x1b")
        terminal.wait_for(r"\A(?s:(?!.*Stop and leave))", 20)
        terminal.wait_for(rules, 20)
        assert not engine.is_running(), "it was told, and is not true"

    def _starts_again(self, rules: str) -> None:
        self.slow(0)
        self.terminal.press("R")
        self.terminal.wait_for(rf"\A(?s:(?!.*{NONE}))", 20)
        self.measured(rules)

    def measured(self, rules: str) -> None:
        self.terminal.wait_for(r"SQNR +\d\d\.\d\d dB", 60)
        self.terminal.wait_for(r"\bready\b", 60)
        self.terminal.wait_for(rules, 20)

    def loading(self, number: signal.Signals) -> None:
        """Let the engine die before the tree is there."""
        self.terminal.wait_for("importing torch", 60)
        self._dies(number, "no engine")
        self._starts_again(r"\* +bf16")

    def measuring(self, number: signal.Signals) -> None:
        """Let the engine die while it measures. A rule that is added without an engine is measured by the next engine."""
        self.slow(0.2)
        self.terminal.press("m")
        self.terminal.wait_for("measuring: candidate", 20)
        self._dies(number, r"\* +bf16")
        self.terminal.press("3")
        self.terminal.wait_for(r"\* +f16", 20)
        self._starts_again(r"\* +f16")

    def scanning(self, number: signal.Signals) -> None:
        """Let the engine die while it scans. The key for the scan starts a new one: the unfinished one died with its engine."""
        self.slow(0.3)
        self.terminal.press("s")
        self.terminal.wait_for("Every weight is scored", 20)
        self.terminal.press("\r")
        self.terminal.wait_for("Esc stop ", 20)
        self._dies(number, r"\* +f16")
        self._starts_again(r"\* +f16")
        self.terminal.press("s")
        self.terminal.wait_for("SQNR .*bf16", 60)  # the tree has a column for it
        self.measured(r"\* +f16")

    def exporting(self, number: signal.Signals) -> None:
        """Let the engine die while it writes an export. Nothing of the unfinished export may be left."""
        target = self._folder / "out"
        self.terminal.press("e")
        self.terminal.wait_for("tensors: ", 60)
        self.terminal.press("\x15")
        self.terminal.wait_for(r"\A(?s:(?!.*-cast ))", 20)
        self.terminal.press(str(target))
        self.terminal.wait_for("/out ", 20)
        halting = threading.Thread(target=self._halt_when_it_writes, args=(self.engine(),), daemon=True)
        halting.start()
        self.terminal.press("\r")
        self.terminal.read_until(lambda: not halting.is_alive(), 30)
        assert not target.exists()
        self._dies(number, r"\* +f16")
        assert not self._unfinished()
        assert not target.exists()
        self._starts_again(r"\* +f16")

    def _halt_when_it_writes(self, engine: psutil.Process) -> None:
        while not self._unfinished():
            time.sleep(0.0005)
        engine.suspend()

    def _unfinished(self) -> list[Path]:
        return [path for path in self._folder.glob(".*partial*") if any(path.iterdir())]

    def leave(self) -> None:
        """Quit. The terminal must be restored, the rules saved, and no engine left."""
        engine = self.engine()
        self.terminal.leave()
        engine.wait(10)
        (kept,) = (read_session(path) for path in (self._folder / "state/dtype-tui/sessions").glob("*.json"))
        assert [str(rule) for rule in kept.recipe.rules] == ["*=float16"]


def walk(folder: Path, signals: tuple[signal.Signals, ...], say: Callable[[str], None] = lambda line: None) -> None:
    """Run one program whose engine dies of the first signal while loading, of the second while measuring, and so on."""
    deaths = Deaths(folder)
    with deaths.terminal:
        for state, number in zip(
            (deaths.loading, deaths.measuring, deaths.scanning, deaths.exporting), signals, strict=True
        ):
            state(number)
            say(f"{number.name} while {state.__name__}: told, and started again")
        deaths.leave()


def main() -> None:
    """Run all signals in all states."""
    for first in range(len(SIGNALS)):
        with tempfile.TemporaryDirectory() as folder:
            walk(Path(folder), (*SIGNALS[first:], *SIGNALS[:first]), print)


if __name__ == "__main__":
    try:
        main()
    except AssertionError as error:
        print(error, file=sys.stderr)
        os._exit(1)
