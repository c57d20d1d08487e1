"""Python programs that need torch, each in a process of its own, forked from one that has imported it: an interpreter takes five
seconds to get there. So are the servers from which `multiprocessing` forks the workers of such programs, and its other helpers.

To signals, limits and its end such a process is one like any other. What is imported when is no test for it.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import json
import os
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.helpers.paths import ROOT

COMMAND = "import sys; from dtype_engine.cli import main; main()"
"""The program `dtype-engine`."""
ENGINE = "import sys; sys.path.remove(''); from dtype_engine.service.stdio import main; main()"
"""The app's engine, which finds no module in the folder that it runs in (`python -P`)."""

LINGERING = """
import os, subprocess, sys
from dtype_engine.service import linger

class Forked:
    def __init__(self, command, *, cwd, stdout, pass_fds, **_):
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            os.chdir(cwd)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(stdout, 1)
            os.dup2(stdout, 2)
            (listener,) = pass_fds
            os.closerange(3, listener)
            os.closerange(listener + 1, 1000)
            sys.argv = list(command[3:])
            linger.main()
    def wait(self):
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

subprocess.Popen = Forked
from dtype_engine.cli import main; main()
"""
"""The program `dtype-engine`, where `stdio --linger` forks the engine that outlives it: that has imported torch as well."""

_FOLDER = "DTYPE_TUI_PRELOADED"
"""The variable with the folder of those that have one such process together."""

# Each connection asks for one program: code, and its open files, by number; without numbers, its three streams. It is answered
# with two lines, the program's number and its exit status; where the connection ends first, whoever asked is gone, and the program
# is killed.
#
# A program ends by `os._exit` once all is done that is to be done at an end: taking apart what was imported writes to all of its
# memory, which is copied for that, and takes a third of a second. Coverage saves its figures after that. What the imports want done
# at an end, mostly torch's libraries of operators, takes as long as two forks, and is forgotten.
_SERVER = """
import atexit, os, sys
status = None
def end():
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except (AttributeError, OSError, ValueError):
        return  # the interpreter has its own way with that
    if status is not None and "coverage" not in sys.modules:
        os._exit(status)
atexit.register(end)  # the first that is registered is the last that is called

import contextlib, fcntl, gc, importlib, json, multiprocessing.forkserver, pkgutil, select, signal, socket, weakref
import dtype_engine, dtype_tui
import dtype_engine.runtime.export, dtype_engine.runtime.session.session, dtype_engine.service.stdio, dtype_engine.service.worker
import dtype_engine.service.run_commands, dtype_engine.service.writer, dtype_engine.service.messages
import dtype_tui.app, dtype_tui.main_screen, hypothesis, torch, transformers
from transformers import AutoTokenizer, AutoModelForCausalLM, LlamaForCausalLM

for package in (dtype_engine, dtype_tui):
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not found.name.endswith("__main__"):
            with contextlib.suppress(ImportError):
                importlib.import_module(found.name)  # ImportError: of an optional package
hypothesis.find(hypothesis.strategies.integers(), lambda _: True)  # the first example waits until all modules' constants are read

multiprocessing.set_executable(sys.argv[2])
weakref.finalize._registry.clear()
gc.freeze()  # a child that ends would go through all of it, and copy its memory
listening = socket.socket(socket.AF_UNIX)
listening.bind(sys.argv[1])
listening.listen()
print(flush=True)
running = {}  # the program of each connection: its number, and what can be read from once it has ended
child = None
while child != 0:
    ready = select.select([listening, sys.stdin, *running, *(ended for _, ended in running.values())], [], [])[0]
    if sys.stdin in ready:  # the tests are over
        for child, _ in running.values():
            os.kill(child, signal.SIGKILL)
        sys.exit()
    for asking, (child, ended) in list(running.items()):
        if ended in ready:
            with contextlib.suppress(OSError):
                asking.send(b"%d\\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            os.close(ended)
            asking.close()
            del running[asking]
        elif asking in ready:
            os.kill(child, signal.SIGKILL)
    if listening in ready:
        asking, _ = listening.accept()
        request, streams, *_ = socket.recv_fds(asking, 1 << 16, 64)
        child = os.fork()
        if child:
            for stream in streams:
                os.close(stream)
            running[asking] = child, os.pidfd_open(child)
            with contextlib.suppress(OSError):
                asking.send(b"%d\\n" % child)
for asked, ended in [(asking, None), *((asked, ended) for asked, (_, ended) in running.items())]:
    asked.close()
    if ended is not None:
        os.close(ended)
listening.close()
asked = json.loads(request)
kept = [fcntl.fcntl(stream, fcntl.F_DUPFD, 200) for stream in streams]  # out of the way of the numbers that they get
for stream in streams:
    os.close(stream)
for number, stream in zip(asked.get("numbers", (0, 1, 2)), kept):
    os.dup2(stream, number)
    os.close(stream)
os.chdir(asked["folder"])
os.environ.clear()
os.environ.update(asked["environment"])
if constants := sys.modules.get("huggingface_hub.constants"):
    importlib.reload(constants)  # it read the environment of the server
sys.argv = ["-c", *asked["arguments"]]
if "DTYPE_TUI_TEST_DRAW_EVERY_S" in os.environ:  # see draw_times.py
    dtype_tui.main_screen.MainScreen.draw_every_s = float(os.environ["DTYPE_TUI_TEST_DRAW_EVERY_S"])
try:
    exec(asked["code"], {"__name__": "__main__"})
    status = 0
except SystemExit as ended:
    status = 0 if ended.code is None else ended.code if isinstance(ended.code, int) else 1
    raise
except Exception:
    status = 1
    raise
"""

# Runs in place of a program, and ends as it does: by the same signal, say.
_RELAY = """
import json, os, signal, socket, sys
def known(number):
    try:
        return os.fstat(number)
    except OSError:
        return False  # it was that of the list itself
asked = socket.socket(socket.AF_UNIX)
asked.connect(sys.argv[1])
numbers = [number for number in map(int, os.listdir("/proc/self/fd")) if number != asked.fileno() and known(number)]
request = dict(code=sys.argv[2], arguments=sys.argv[3:], folder=os.getcwd(), environment=dict(os.environ), numbers=numbers)
socket.send_fds(asked, [json.dumps(request).encode()], numbers)
for number in numbers:
    os.close(number)
with asked.makefile() as answers:
    answers.readline()
    status = int(answers.readline() or 1)
if status < 0:
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


class Forked:
    """`code` under way on three streams, as by `python -c`, with this process's folder and `environment`."""

    def __init__(
        self, code: str, arguments: Sequence[str], environment: Mapping[str, str], streams: Sequence[int]
    ) -> None:
        self._asked = socket.socket(socket.AF_UNIX)
        self._asked.connect(_server())
        request = {"code": code, "arguments": arguments, "folder": os.getcwd(), "environment": dict(environment)}
        socket.send_fds(self._asked, [json.dumps(request).encode()], streams)
        self._told = b""
        while b"\n" not in self._told:
            self._told += self._asked.recv(64)
        self.pid = int(self._told.split()[0])

    def status(self, seconds: float | None = None) -> int | None:
        """Return the exit status, or None if the program has not ended within `seconds`."""
        if self._told.count(b"\n") == 1:
            with selectors.DefaultSelector() as selector:  # `select` takes no descriptor from 1024 on
                selector.register(self._asked, selectors.EVENT_READ)
                if selector.select(seconds):
                    self._told += self._asked.recv(64)
        told = self._told.partition(b"\n")[2]
        return int(told) if told else None


class Program(Forked):
    """`code` under way, as by `python -c`, with this process's folder and environment."""

    def __init__(self, code: str, *arguments: str) -> None:
        reading, writing = os.pipe()
        nothing = os.open(os.devnull, os.O_RDONLY)
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115
        super().__init__(code, arguments, os.environ, [nothing, writing, self._stderr.fileno()])
        os.close(writing)
        os.close(nothing)
        self.stdout = open(reading)  # noqa: SIM115

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def result(self) -> subprocess.CompletedProcess[str]:
        """Wait until the program ends. Returns the output that was not read yet."""
        stdout = self.stdout.read()
        status = self.status()
        assert status is not None
        self._asked.close()
        self.stdout.close()
        with self._stderr as file:
            file.seek(0)
            return subprocess.CompletedProcess((), status, stdout, file.read())


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `code` to its end."""
    return Program(code, *arguments).result()


def module(name: str) -> str:
    """Code that runs a module of the tests, as by `python -m`."""
    return f"import runpy, sys; sys.path.insert(0, {str(ROOT)!r}); runpy.run_module({name!r}, run_name='__main__')"


def command(code: str, *arguments: str) -> tuple[str, ...]:
    """A command that runs `code` on its own standard streams, in its folder and environment; ended, it takes what runs with it."""
    return (sys.executable, "-S", "-E", "-c", _RELAY, _server(), code, *arguments)


def after(first: Sequence[str], code: str, mark: Path) -> tuple[str, ...]:
    """A command that is `first` when it is run for the first time, and then runs `code` as `command` does. mark: a path where
    nothing is; the first run makes a folder there.
    """
    later = shlex.join(command(code))
    return ("sh", "-c", f"mkdir {shlex.quote(str(mark))} 2>/dev/null && exec {shlex.join(first)}; exec {later}")


def share() -> None:
    """Let this process and those that it starts from now on have one such process together. It ends with this one."""
    folder = tempfile.TemporaryDirectory(prefix="preloaded-")
    atexit.register(folder.cleanup)
    os.mkfifo(Path(folder.name, "alive"))
    os.open(
        Path(folder.name, "alive"), os.O_RDWR
    )  # for good: what reads from it sees an end when this process has ended
    os.environ[_FOLDER] = folder.name


@functools.cache
def _server() -> str:
    """Return the address at which the process that has imported torch listens."""
    if _FOLDER not in os.environ:
        share()
    folder = Path(os.environ[_FOLDER])
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several at once, one starts it
        if not (folder / "asked").exists():
            with open(folder / "alive") as alive:
                # What multiprocessing starts in place of Python: the last argument is the code that it wants run.
                (folder / "python").write_text(
                    f"#!/bin/sh\nfor code; do :; done\n"
                    f'exec {shlex.join([sys.executable, "-S", "-E", "-c", _RELAY, str(folder / "asked")])} "$code"\n'
                )
                (folder / "python").chmod(0o755)
                server = subprocess.Popen(
                    [sys.executable, "-c", _SERVER, str(folder / "asked"), str(folder / "python")],
                    stdin=alive,
                    stdout=subprocess.PIPE,
                    process_group=0,
                )  # Ctrl+C is not meant for it
            assert server.stdout is not None
            server.stdout.readline()
    return str(folder / "asked")
