"""An engine that outlives its connections: what was told meanwhile arrives, once; it ends by itself; nobody else reaches it.

Engines that are connected to several times are forked from a process that has imported torch; where an engine's start and end are
what is tested, it is started as the program starts it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from tests.helpers import preloaded, slow_line
from tests.helpers.recorded_worker import RecordedProcess, wait_until

from dtype_engine import Options, Recipe, Rule
from dtype_engine.service import events
from dtype_engine.service.commands import SetRecipe
from dtype_engine.service.connection import SESSION, EngineCommand
from dtype_engine.service.save_requests import ConvertRequest, ExportRequest, RecipeRequest

RECIPE = Recipe().then(Rule.parse("*.mlp=bf16"))
ENGINE = str(Path(sys.executable).with_name("dtype-engine"))
pytestmark = pytest.mark.slow


class Far:
    """A command that runs a lingering engine behind a line that can be cut."""

    def __init__(self, folder: Path, program: Sequence[str], linger: str) -> None:
        self.folder = folder
        engine = (*program, "stdio", "--compressed", "--linger", linger, "--session", SESSION)
        line = (sys.executable, slow_line.__file__, str(folder), "0")
        command = EngineCommand((*line, *engine), name="far", compressed=True)
        self.recorded = RecordedProcess(command, "demo", Options(device="cpu"))

    def cut(self) -> None:
        """Cut the line. What was on its way is lost."""
        os.kill(int((self.folder / "pid").read_text()), signal.SIGKILL)

    def logs(self) -> list[Path]:
        """Return the logs of running engines."""
        return sorted((self.folder / "state/dtype-tui/engines").glob("*.log"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


@pytest.fixture
def far(folder: Path) -> Iterator[Far]:
    made = Far(folder, preloaded.command(preloaded.LINGERING), linger="10m")
    made.recorded.worker.start()
    yield made
    made.recorded.worker.close()
    wait_until(lambda: not made.logs(), 20, "the engine has not ended with the app")


def test_results_of_a_disconnected_engine_arrive_once_after_reconnecting(far: Far) -> None:
    recorded = far.recorded
    recorded.wait_for(events.Measured)
    (far.folder / "down-for-now").touch()
    recorded.worker.request(SetRecipe(RECIPE))
    recorded.wait_for(events.CastDone, lambda event: event.recipe == RECIPE)
    far.cut()
    assert "far" in recorded.wait_for(events.EngineLost).message
    later = RECIPE.then(Rule.parse("lm_head=f16"))
    time.sleep(2)
    recorded.worker.request(SetRecipe(later))  # asked for while nobody hears it
    (far.folder / "down-for-now").unlink()
    recorded.wait_for(events.EngineBack)
    assert recorded.measured(later).report.rules == ("*.mlp=bfloat16", "lm_head=float16")
    assert recorded.measured(RECIPE)
    recorded.wait_for(events.Idle, since=recorded.events.index(recorded.measured(later)))
    measured = [event.recipe for event in recorded.of(events.Measured)]
    assert len(measured) == len(set(measured))
    assert len(recorded.of(events.ModelReady)) == 1
    assert not recorded.of(events.EngineEnded)


def test_repeatedly_lost_connection_neither_loses_nor_repeats_results(far: Far) -> None:
    recorded, recipe = far.recorded, Recipe()
    recipes = []
    for pattern in ("*.0.mlp", "*.1.mlp", "*.2.mlp", "*.3.mlp", "*.4.mlp"):
        recipe = recipe.then(Rule.parse(f"{pattern}=bf16"))
        recipes.append(recipe)
        since = len(recorded.events)
        recorded.worker.request(SetRecipe(recipe))
        if len(recipes) > 1:
            far.cut()
            recorded.wait_for(events.EngineBack, since=since)
        recorded.measured(recipe)
    measured = [event.recipe for event in recorded.of(events.Measured) if event.recipe.rules]
    assert measured == recipes


def test_killed_remote_engine_is_reported_and_replaced(far: Far) -> None:
    recorded = far.recorded
    recorded.wait_for(events.Measured)
    recorded.worker.request(SetRecipe(RECIPE))
    os.kill(engine_process(far), signal.SIGKILL)
    assert "killed (SIGKILL)" in recorded.wait_for(events.EngineEnded).message
    since = len(recorded.events)
    recorded.worker.restart()
    assert recorded.measured(RECIPE, since)
    assert len(far.logs()) == 1, "nothing of the dead one is left"


def test_restart_ends_the_remote_engine_and_starts_another(far: Far) -> None:
    recorded = far.recorded
    recorded.wait_for(events.Measured)
    first = engine_process(far)
    since = len(recorded.events)
    recorded.worker.restart()
    recorded.wait_for(events.Measured, since=since)
    wait_until(lambda: not Path(f"/proc/{first}").exists(), 10)


def test_remote_session_writes_exports_remotely_and_recipes_locally(far: Far, tmp_path: Path) -> None:
    recorded = far.recorded
    recorded.worker.request(SetRecipe(RECIPE))
    recorded.measured(RECIPE)
    recorded.worker.save(RecipeRequest(tmp_path / "r.yaml"))
    assert "r.yaml, here" in recorded.wait_for(events.Saved).sentence
    assert "*.mlp" in (tmp_path / "r.yaml").read_text()
    recorded.worker.save(RecipeRequest(tmp_path / "r.yaml"))
    assert not recorded.wait_for(events.Saved, lambda event: "exists" in event.sentence).done
    recorded.worker.save(ExportRequest(tmp_path / "out"))
    assert recorded.wait_for(events.Saved, lambda event: "exported" in event.sentence).sentence.startswith("far: ")
    recorded.worker.save(ConvertRequest(tmp_path / "r.json", "torchao"))
    assert recorded.wait_for(events.Saved, lambda event: "r.json" in event.sentence).done


def engine_process(far: Far) -> int:
    """Return the process of the engine: the only one that has its log open."""
    log = str(far.logs()[0])
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(file.path == log for file in process.open_files()):
                return process.pid
    raise AssertionError("no engine runs")


def test_remote_engine_ends_after_its_linger_time_without_a_client(folder: Path) -> None:
    far = Far(folder, (ENGINE,), linger="2s")
    far.recorded.worker.start()
    far.recorded.wait_for(events.Measured)
    (folder / "down-for-now").touch()
    far.cut()
    wait_until(lambda: not far.logs(), 30)
    (folder / "down-for-now").unlink()
    assert "is gone" in far.recorded.wait_for(events.EngineEnded).message
    far.recorded.worker.close()


def relay(folder: Path, session: str, **more: str) -> subprocess.Popen[bytes]:
    command = [*preloaded.command(preloaded.LINGERING), "stdio", "--linger", "5s", "--session", session]
    environment = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), **more}
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )


def test_socket_folder_with_open_permissions_is_refused(folder: Path) -> None:
    engines = folder / "state/dtype-tui/engines"
    engines.mkdir(parents=True)
    for mode in (0o777, 0o750, 0o701):
        engines.chmod(mode)
        process = relay(folder, "abc")
        output, errors = process.communicate(b"", timeout=60)
        assert process.returncode == 2
        assert b"open to others" in errors
        assert output == b""
        assert not list(engines.iterdir())


def test_socket_folder_that_is_a_symlink_is_refused(folder: Path) -> None:
    (folder / "elsewhere").mkdir(mode=0o700)
    (folder / "state/dtype-tui").mkdir(parents=True)
    (folder / "state/dtype-tui/engines").symlink_to(folder / "elsewhere")
    process = relay(folder, "abc")
    _, errors = process.communicate(b"", timeout=60)
    assert process.returncode == 2
    assert b"can't use" in errors


def test_stale_socket_is_replaced_and_sessions_with_other_tokens_are_separate(folder: Path) -> None:
    engines = folder / "state/dtype-tui/engines"
    engines.mkdir(parents=True, mode=0o700)
    with socket.socket(socket.AF_UNIX) as stale:
        before = os.getcwd()
        os.chdir(engines)
        stale.bind("one.socket")
        os.chdir(before)
    one, two = relay(folder, "one"), relay(folder, "two")
    for process in (one, two):
        assert process.stdout is not None
        assert process.stdout.read(14) == b"\0dtype-engine\0"
    assert sorted(path.name for path in engines.iterdir()) == ["one.log", "one.socket", "two.log", "two.socket"]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in engines.glob("*.log"))
    one_more = relay(folder, "one")  # the newest is the one that counts
    assert one_more.stdout is not None
    assert one_more.stdout.read(14) == b"\0dtype-engine\0"
    assert one.wait(20) == 0
    assert two.poll() is None
    close = b"\0\0\0\x07\x91\xa5Close"
    for process in (one_more, two):
        process.communicate(close, timeout=60)
    wait_until(lambda: not list(engines.iterdir()), 20)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--linger", "10m"], "go together"),
        (["--session", "abc"], "go together"),
        (["--linger", "ten", "--session", "abc"], "is not a time"),
        (["--linger", "10m", "--session", "../x"], "letters and digits"),
    ],
)
def test_invalid_stdio_options_are_refused_in_one_line(arguments: list[str], words: str) -> None:
    done = subprocess.run([ENGINE, "stdio", *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 2
    assert words in done.stderr, shlex.join(arguments)
    assert done.stdout == ""
