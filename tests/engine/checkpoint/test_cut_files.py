"""A checkpoint's file that is cut short while its weights are mapped or read: no figure and no export comes of it.

The damage is done by os.truncate, as another program does it, in processes of their own: reading a page that a mapping has and its
file has no more is SIGBUS, which ends the process.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.helpers import preloaded
from tests.helpers.recorded_worker import RecordedProcess

from dtype_engine import Options, Recipe
from dtype_engine.checkpoint import ByteRange, FileIdentity, crash_watch, open_checkpoint, unchanged
from dtype_engine.checkpoint.check import check
from dtype_engine.checkpoint.check.values import pieces
from dtype_engine.core.errors import Cancelled, UserError
from dtype_engine.core.regular_files import reading
from dtype_engine.service import events
from dtype_engine.service.commands import SetRecipe
from dtype_engine.service.connection import EngineCommand


@pytest.fixture
def opened(tmp_path: Path) -> FileIdentity:
    (tmp_path / "weights").write_bytes(bytes(1 << 16))
    return FileIdentity.of(tmp_path / "weights")


def cut(file: FileIdentity, error: Exception | None = None) -> None:
    """Truncate a file, and raise `error` if it is given."""
    os.truncate(file.path, 100)
    if error is not None:
        raise error


def test_file_cut_short_before_reading_is_refused(opened: FileIdentity) -> None:
    cut(opened)
    with pytest.raises(UserError, match="was cut short: it had 65536 bytes and has 100"), unchanged((opened,)):
        pytest.fail("the block runs")


def test_values_read_while_the_file_was_truncated_are_refused(opened: FileIdentity) -> None:
    with pytest.raises(UserError, match="was cut short"), unchanged((opened,)):
        cut(opened)


def test_every_error_while_reading_a_truncated_file_reports_the_truncation(opened: FileIdentity) -> None:
    with pytest.raises(UserError, match="was cut short"), unchanged((opened,)):
        cut(opened, OSError("Bad address"))


def test_read_error_on_an_intact_file_is_raised_unchanged(opened: FileIdentity) -> None:
    with pytest.raises(OSError, match="Bad address"), unchanged((opened,)):
        raise OSError("Bad address")


def test_cancelled_is_raised_unchanged_although_a_file_is_truncated(opened: FileIdentity) -> None:
    with pytest.raises(Cancelled), unchanged((opened,)):
        cut(opened, Cancelled())


# Where the program has begun to read, its source is cut to half: `name` is a function of the program, whose call does it first.
CUTTING = """
import importlib, os, sys
where, name, path, program = sys.argv[1:5]
place = importlib.import_module(where)
owner, _, attribute = name.rpartition(".")
owner = getattr(place, owner) if owner else place
before = getattr(owner, attribute)
def cutting(*given, **named):
    os.truncate(path, 40_000)
    return before(*given, **named)
setattr(owner, attribute, cutting)
sys.argv = ["dtype-engine", *sys.argv[5:]]
importlib.import_module(program).main()
"""
MEASURING = ("dtype_engine.runtime.measure.drift", "DriftMeter.measure")


@pytest.fixture
def source(make_llama: Callable[..., Path]) -> Path:
    folder = make_llama(hidden_size=64, intermediate_size=128)
    assert (folder / "model.safetensors").stat().st_size > 200_000
    return folder


def run_cutting(source: Path, where: str, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command, *rest = arguments
    file = str(source / "model.safetensors")
    program = preloaded.command(CUTTING, where, name, file, "dtype_engine.cli", command, str(source), *rest)
    # This reads until the process that says what was cut short, a moment after the program has ended, has closed the pipe as well.
    return subprocess.run(program, capture_output=True, text=True, check=False)


def overwrite(path: Path) -> None:
    """Replace the last value of a file by zeros in place, and set its time back."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(bytes(4))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (overwrite, "was written to and its time set back"),
        (lambda path: os.truncate(path, 40_000), "was cut short: it had [0-9]+ bytes and has 40000"),
    ],
    ids=["overwritten in place", "cut short"],
)
@pytest.mark.parametrize("changed", ["model", "against"])
def test_check_refuses_a_file_that_changes_while_values_are_read(
    change: Callable[[Path], None], says: str, changed: str, source: Path, tmp_path: Path
) -> None:
    folders = {"model": source, "against": Path(shutil.copytree(source, tmp_path / "against"))}
    model, against = (open_checkpoint(folder) for folder in folders.values())
    file = folders[changed] / "model.safetensors"
    begun: list[str] = []

    def on_progress(what: str, done: int, total: int) -> None:
        if what == "values" and not begun:
            begun.append(what)
            change(file)

    with pytest.raises(UserError, match=rf"^{re.escape(str(file))} {says}.*; open the model again$"):
        check(model, "x", against, values=True, progress=on_progress)


def test_bytes_beyond_the_end_of_a_truncated_file_are_refused_by_its_name(opened: FileIdentity) -> None:
    cut(opened)
    with pytest.raises(UserError, match=rf"^{re.escape(str(opened.path))} was cut short .*; open the model again$"):
        list(pieces(ByteRange(opened.path, 0, opened.size)))


def test_read_error_without_a_number_is_reported_by_its_message() -> None:
    with pytest.raises(UserError, match=r"^can't read weights: Bad address$"), reading("weights"):
        raise OSError("Bad address")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere other signals may come of it")
@pytest.mark.parametrize(
    ("where", "name", "arguments"),
    [
        (*MEASURING, ["drift", "--cast", "*=bf16"]),
        ("dtype_engine.runtime.session.session", "measure_speed", ["speed", "--cast", "*=int8"]),
        ("dtype_engine.runtime.scan.scan", "Scan.run", ["scan", "--dtypes", "int8"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_command_killed_by_sigbus_names_the_truncated_file_in_one_line(
    where: str, name: str, arguments: list[str], source: Path
) -> None:
    file = source / "model.safetensors"
    size = file.stat().st_size
    done = run_cutting(source, where, name, *arguments)
    assert (done.returncode, done.stdout) == (-signal.SIGBUS, "")
    assert done.stderr.startswith(f"dtype-engine: {file} was cut short: it had {size} bytes and has 40000 ")
    assert done.stderr.endswith("; open the model again\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("told", "says"),
    [
        (b"", ""),
        (
            b"Fatal Python error: Illegal instruction\n\nThread 1\n",
            "Fatal Python error: Illegal instruction\n\nThread 1\n",
        ),
        (
            b"Fatal Python error: Segmentation fault\n\nThread 1\n",
            "dtype-engine: a library in the process crashed (SIGSEGV); DTYPE_TUI_TRACEBACK=1 shows where\n",
        ),
        (
            b"Fatal Python error: Aborted\n\nThread 1\n",
            "dtype-engine: the process was aborted (SIGABRT), probably for want of memory; "
            "DTYPE_TUI_TRACEBACK=1 shows where\n",
        ),
        (
            b"Fatal Python error: Bus error\n\nThread 1\n",
            "dtype-engine: a file that is mapped into memory can't be read (SIGBUS): its disk failed; "
            "DTYPE_TUI_TRACEBACK=1 shows where\n",
        ),
    ],
    ids=["no crash", "another crash", "a fault", "an abort", "a failed disk"],
)
def test_crash_that_no_file_explains_is_reported(told: bytes, says: str, source: Path) -> None:
    file = FileIdentity.of(source / "model.safetensors")
    entries = [json.dumps(entry) for entry in (sys.path, [str(file.path), *file.state])]
    given = "".join(f"file {entry}\n" for entry in entries).encode() + told
    done = subprocess.run([sys.executable, "-S", crash_watch.__file__], input=given, capture_output=True, check=True)
    assert (done.stdout, done.stderr.decode()) == (b"", says)


@pytest.mark.slow
@pytest.mark.parametrize("casts", [["--cast", "*=bf16"], ["--cast", "*=int8"], []], ids=lambda casts: casts[-1:])
def test_export_from_a_truncated_file_is_refused_in_one_line(casts: list[str], source: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    done = run_cutting(
        source, "dtype_engine.runtime.export.export", "write_file", "export", *casts, "-o", str(place / "out")
    )
    assert done.returncode == 2, (done.returncode, done.stderr[-2000:])
    assert done.stderr.count("\n") == 1
    assert f"{source / 'model.safetensors'} was cut short" in done.stderr
    assert "open the model again" in done.stderr
    assert done.stdout == ""
    assert list(place.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere other signals may come of it")
def test_app_reports_an_engine_killed_by_a_truncated_file(source: Path) -> None:
    file = str(source / "model.safetensors")
    command = EngineCommand((*preloaded.command(CUTTING), *MEASURING, file, "dtype_engine.service.stdio"))
    recorded = RecordedProcess(command, str(source), Options(device="cpu"))
    recorded.worker.start()
    try:
        recorded.worker.request(SetRecipe(Recipe()))
        ended = recorded.wait_for(events.EngineEnded, seconds=100)
        assert f"ended: {file} was cut short: it had " in ended.message
        assert "open the model again" in ended.message
    finally:
        recorded.worker.close()
