"""An engine in a process of its own: what it says arrives, its end is an event, and whatever answers instead does no harm."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.helpers import preloaded
from tests.helpers.recorded_worker import RecordedProcess, wait_until

from dtype_engine import Options, Recipe, Rule
from dtype_engine.service import control, events
from dtype_engine.service.commands import Cancel, SetRecipe
from dtype_engine.service.connection import COMMAND, MOST_UNSENT, EngineCommand, signal_words
from dtype_engine.service.jobs import FLOW
from dtype_engine.service.process import EngineProcess
from dtype_engine.service.save_requests import RecipeRequest, ReportRequest

RECIPE = Recipe().then(Rule.parse("*.mlp=bf16"))
Start = Callable[..., RecordedProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts an engine of the command, forked from a process that has imported torch by default, and closes it in the end."""
    started: list[RecordedProcess] = []

    def begin(command: EngineCommand | None = None, model: str | None = "demo") -> RecordedProcess:
        command = command or EngineCommand(preloaded.command(preloaded.ENGINE))
        recorded = RecordedProcess(command, model, Options(device="cpu"))
        started.append(recorded)
        recorded.worker.start()
        return recorded

    yield begin
    for recorded in started:
        recorded.worker.close()


def test_requests_made_before_the_engine_starts_are_fulfilled(start: Start, tmp_path: Path) -> None:
    recorded = start()
    recorded.worker.request(SetRecipe(RECIPE))
    measured = recorded.measured(RECIPE)
    assert measured.report.rules == ("*.mlp=bfloat16",)
    assert sum(isinstance(event, events.Measured) for event in recorded.events) == 1, (
        "the empty recipe was not measured first"
    )
    recorded.worker.save(RecipeRequest(tmp_path / "r.yaml", drift=measured.report))
    assert recorded.wait_for(events.Saved).done
    assert "*.mlp" in (tmp_path / "r.yaml").read_text()


def test_signals_that_end_the_engine_are_explained() -> None:
    """`tests/terminal/test_engine_deaths.py` shows the same for real engines."""
    assert "cut short" in signal_words(signal.SIGBUS)
    assert "a library in it crashed (SIGSEGV)" in signal_words(signal.SIGSEGV)
    assert "SIGTERM" in signal_words(signal.SIGTERM)
    assert signal_words(64)


def test_dead_engine_process_is_reported_and_replaced(start: Start) -> None:
    recorded = start()
    recorded.worker.request(SetRecipe(RECIPE))
    recorded.wait_for(events.Memory)
    os.kill(recorded.child, signal.SIGKILL)
    ended = recorded.wait_for(events.EngineEnded)
    assert "killed (SIGKILL), perhaps for want of memory; it held" in ended.message
    recorded.worker.request(FLOW.ask(None))  # there is no one to ask
    since, later = len(recorded.events), RECIPE.then(Rule.parse("lm_head=f16"))
    recorded.worker.request(SetRecipe(later))
    recorded.worker.restart()
    assert recorded.measured(later, since).report.rules == ("*.mlp=bfloat16", "lm_head=float16")
    assert not recorded.answers(FLOW)


def test_engine_killed_while_importing_is_restarted(start: Start, tmp_path: Path) -> None:
    recorded = start(EngineCommand(preloaded.after(COMMAND, preloaded.ENGINE, tmp_path / "started")))
    recorded.wait_for(events.LoadingProgress)
    first = recorded.child
    recorded.worker.restart()
    recorded.wait_for(events.Measured)
    assert recorded.child != first
    assert not recorded.of(events.EngineEnded)


def test_closing_the_app_ends_the_engine_process(start: Start) -> None:
    recorded = start(EngineCommand())
    recorded.wait_for(events.LoadingProgress)
    child = recorded.child
    begun = time.monotonic()
    recorded.worker.close()
    assert time.monotonic() - begun < 8
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    assert not recorded.of(events.EngineEnded)


def test_remote_save_requests_cancelled_before_the_start_write_nothing(start: Start, tmp_path: Path) -> None:
    elsewhere = EngineCommand(preloaded.command("from dtype_engine.service.stdio import main; main()"), name="host")
    recorded = start(elsewhere)
    recorded.worker.save(ReportRequest(tmp_path / "one.html"))
    recorded.worker.save(ReportRequest(tmp_path / "two.html"))
    recorded.worker.request(Cancel())
    recorded.wait_for(events.Stopped, lambda event: event.dropped.count("write") == 2)
    recorded.worker.save(RecipeRequest(tmp_path / "r.yaml"))
    saved = recorded.wait_for(events.Saved)
    assert (saved.done, saved.sentence) == (True, f"wrote {tmp_path / 'r.yaml'}, here")
    assert [path.name for path in tmp_path.iterdir()] == ["r.yaml"]
    assert not recorded.of(events.EngineEnded)


def test_missing_model_is_reported_by_the_engine_process(start: Start) -> None:
    recorded = start(model="/nowhere/at/all")
    assert "/nowhere/at/all" in recorded.wait_for(events.OpenFailed).message


def python(program: str) -> EngineCommand:
    return EngineCommand((sys.executable, "-c", program), name="host")


HELLO = (
    f"PROTOCOL = {control.PROTOCOL}"
    + """
import sys, msgspec
def put(*message):
    data = msgspec.msgpack.encode(message)
    sys.stdout.buffer.write(len(data).to_bytes(4, "big") + data)
    sys.stdout.buffer.flush()
sys.stdout.buffer.write(b"motd\\n\\0dtype-engine\\0")
"""
)
GREETED = HELLO + "put('Hello', PROTOCOL, 'x', [], 0, False)\n"
HOSTILE = {
    "ends": ("raise SystemExit('bash: dtype-engine: command not found')", "command not found"),
    "garbage": (GREETED + "sys.stdout.buffer.write(bytes(range(256)) * 999)", "does not understand"),
    "another version": (
        HELLO + "put('Hello', 99, '9.9\\x1b[2J', [], 0, False)\nsys.stdin.read()",
        "has dtype-tui 9.9\\x1b[2J",
    ),
    "without torch": (
        HELLO + "put('Hello', PROTOCOL, 'x', ['torch'], 0, False)\nsys.stdin.read()",
        "torch can't be imported",
    ),
    "endless line": ("while True: print('y' * 100000, end='')", "no dtype-engine"),
    "no message": (GREETED + "put('Rm', '-rf')\nsys.stdin.read()", "does not understand"),
    "a file that nobody asked for": (
        GREETED + "put('Composed', 0, 'text', [])\nsys.stdin.read()",
        "does not understand",
    ),
    "its own end": (GREETED + "put('EngineLost', 'x')\nsys.stdin.read()", "does not understand"),
    "4 GB": (HELLO + "sys.stdout.buffer.write(b'\\xff' * 4)\nsys.stdout.flush()\nsys.stdin.read()", "no dtype-engine"),
    "a bare event": (HELLO + "put('Idle')\nsys.stdin.read()", "dtype-engine"),
    "an empty line": ("print()\nimport sys; sys.stdin.read()\nsys.exit(3)", "status"),
}


@pytest.mark.parametrize("name", list(HOSTILE))
def test_hostile_engine_process_is_reported_in_one_sentence(start: Start, name: str) -> None:
    program, words = HOSTILE[name]
    if name == "an empty line":
        program = program.replace("sys.stdin.read()\n", "")
    recorded = start(python(program))
    ended = recorded.wait_for(events.EngineEnded, seconds=60)
    assert words in ended.message
    assert ended.message.isprintable()
    assert len(ended.message) < 500


def test_engine_command_that_does_not_exist_is_reported(start: Start) -> None:
    assert "No such file" in start(EngineCommand(("/nowhere/dtype-engine",))).wait_for(events.EngineEnded).message


def test_pipe_from_the_engine_is_not_read_while_the_app_is_behind() -> None:
    """What the engine sends then stays in the pipe, and the engine waits."""
    behind, emitted, ends = threading.Semaphore(0), list[events.Event](), threading.Event()
    endless = python(GREETED + "put('Opened', '', '')\nwhile True: put('Idle')")
    worker = EngineProcess(
        endless, control.Open(None, Options(), False), emitted.append, wait=lambda: ends.is_set() or behind.acquire()
    )
    worker.start()
    seen = 0
    for _ in range(5):
        wait_until(lambda seen=seen: len(emitted) > seen)  # type: ignore[misc]
        time.sleep(0.05)
        assert len(emitted) - seen <= 8
        seen = len(emitted)
        behind.release()
    ends.set()
    behind.release()
    worker.close(0.1)


def test_engine_that_does_not_read_its_requests_is_ended(start: Start) -> None:
    deaf = python(GREETED + "import time\ntime.sleep(600)")
    recorded = start(deaf)
    wait_until(lambda: recorded.worker._is_connected)
    recipe = Recipe((Rule("a" * 1000, "float16"),))
    for _ in range(MOST_UNSENT + 1000):  # the pipe and the thread that writes have a few
        recorded.worker.request(SetRecipe(recipe))
    assert "it read none of the last 4,096 requests" in recorded.wait_for(events.EngineEnded).message
