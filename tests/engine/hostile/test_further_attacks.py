"""Attacks beyond damaged checkpoints: on workers, ids, tensors, texts and disks. The table of `tests/README.md` has all of them,
with what comes out of each and its test; those that need the app are in `tests/tui/test_further_attacks.py`.
"""

from __future__ import annotations

import io
import os
import resource
import struct
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from tests.helpers import preloaded
from tests.helpers.recorded_worker import RecordedProcess

import dtype_engine as de
from dtype_engine.checkpoint.source import locate
from dtype_engine.cli import cli
from dtype_engine.cli.program import BAD_INPUT, run
from dtype_engine.core.atomic_write import check_target, write_text_atomic
from dtype_engine.core.errors import UserError
from dtype_engine.core.export_lock import recover_stale
from dtype_engine.core.input_args import check_files
from dtype_engine.evaluation.evaluate import evaluate
from dtype_engine.evaluation.specs import CompareTensors, Evaluation, Exported, Opened, RecipeDrift
from dtype_engine.runtime.inputs.tensor_files import read_tensors
from dtype_engine.runtime.inputs.text import TextSample, read_jsonl, refuse_long
from dtype_engine.service import events
from dtype_engine.service.commands import Cancel, SetRecipe
from dtype_engine.service.connection import EngineCommand
from dtype_engine.service.save_requests import ExportRequest
from dtype_engine.service.worker import Worker

RECIPE = de.Recipe().then(de.Rule.parse("*.mlp=bf16"))


# -- a scheduler that hands a worker other paths ---------------------------------------------------------------------


@pytest.mark.parametrize("model", ["/etc/passwd", "/dev/zero", "..", "a\0b", "tcp://host/x", "file:///etc/passwd"])
def test_error_of_a_worker_reveals_no_content_of_the_given_path(model: str, tmp_path: Path) -> None:
    """The paths hold no model. For other models see `test_worker_refuses_a_model_or_inputs_that_differ_from_the_requested_ones`."""
    opened = Opened(model, de.Options(device="cpu", prompts=("hello",)), "w" * 64, "i" * 64)
    with pytest.raises(UserError, match=r"^process \d+ on .* can't open the model: ") as told:
        evaluate(Evaluation(opened, RecipeDrift(de.Recipe(), de.RunSettings())))
    assert "root:" not in str(told.value)
    compared = Exported(model, de.Options(device="cpu"), Path("/etc"), "c" * 64)
    with pytest.raises(UserError, match=r"^process \d+ on .* can't open the export: "):
        evaluate(Evaluation(compared, CompareTensors((0,))))
    assert list(tmp_path.iterdir()) == []


# -- ids ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model", ["org/..", "org/../../x", "models--org--name", "org/name@../../x", "%2e%2e/x", "-x", "org\\name", "org/\x1b[2J", "a\n"]
)  # fmt: skip
def test_hub_model_id_cannot_open_other_folders(model: str) -> None:
    with pytest.raises(UserError, match="no such folder or file, and no Hugging Face model of this name") as told:
        locate(model)
    assert str(told.value).isprintable()


@pytest.mark.parametrize("revision", ["../../../outside", "/etc", "\x1b[2J", "x" * 5000, ""])
def test_revision_in_the_hub_cache_cannot_name_another_folder(
    revision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stands in `refs/main` names a folder of `snapshots`."""
    cached = tmp_path / "hub" / "models--org--name"
    for folder in (cached / "refs", cached / "snapshots", tmp_path / "outside"):
        folder.mkdir(parents=True)
    (tmp_path / "outside" / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    (cached / "refs" / "main").write_text(revision)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(UserError, match="no Hugging Face model of this name"):
        locate("org/name")


@pytest.mark.parametrize("token", ["../x", "a/b", "..", "", "x" * 300, "\x1b", "-x"])
def test_engine_session_token_cannot_be_a_path(token: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cli, "dtype-engine", ["stdio", "--linger", "10m", "--session", token]) == BAD_INPUT
    assert capsys.readouterr().err == ("dtype-engine: Invalid value for '--session': at most 40 letters and digits\n")


# -- tensors and texts -------------------------------------------------------------------------------------------------


class Malicious:
    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return print, ("must never run",)


def npy(header: object, data: bytes = b"", version: bytes = b"\1\0") -> bytes:
    written = (header if isinstance(header, str) else repr(header)).encode() + b"\n"
    return b"\x93NUMPY" + version + struct.pack("<H" if version == b"\1\0" else "<I", len(written)) + written + data


def array(dtype: object, shape: tuple[object, ...], data: bytes = b"") -> bytes:
    return npy({"descr": dtype, "fortran_order": False, "shape": shape}, data)


def pickled() -> bytes:
    written = io.BytesIO()
    np.save(written, np.array([Malicious()], dtype=object), allow_pickle=True)
    return written.getvalue()


ARRAYS: dict[str, tuple[bytes, str]] = {
    "a pickled object": (pickled(), "x holds Python objects, so it is not read: unpickling can run any code"),
    "a structure with an object": (array([("a", "O")], (1,)), "x holds Python objects"),
    "a pickle": (b"\x80\x04K\x01.", "x is not an array"),
    "values of no bytes without end": (array("|V0", (2**40,)), r"should be \|V0 of shape \(1099511627776,\), and 0 bytes"),
    "more than is stored": (array("<f4", (2**40,)), "should be float32 of shape .* and 0 bytes are stored of it"),
    "less than is stored": (array("<f4", (1,), bytes(8)), "and 8 bytes are stored of it"),
    "a product beyond 64 bits": (array("<f4", (2**62, 2**62)), "and 0 bytes are stored of it"),
    "nothing times too much": (array("<f4", (0, 2**62, 2**62)), "can't read the tensors of .*array is too big"),
    "a negative dimension": (array("<f4", (-2, -3), bytes(24)), "and 24 bytes are stored of it"),
    "a dimension of 400 digits": (array("<f4", (10**400,)), "and 0 bytes are stored of it"),
    "a text of 2 GB": (array("|S2000000000", (1,)), "and 0 bytes are stored of it"),
    "a header that is code": (npy("__import__('os').abort()"), "is not an array"),
    "a header of 5 MB": (npy("{" + " " * 5_000_000 + "}", version=b"\2\0"), "is not an array"),
    "a version of its own": (npy({}, version=b"\x09\0"), "in a version of NumPy's format"),
}  # fmt: skip


@pytest.mark.parametrize("what", ARRAYS)
def test_npz_array_that_does_not_fit_its_header_is_refused(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, says = ARRAYS[what]
    path = tmp_path / "x.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", content)
    with pytest.raises(UserError, match=says) as told:
        read_tensors(path)
    assert str(path) in str(told.value)
    assert len(str(told.value)) < 500
    assert "must never run" not in capsys.readouterr().out


@pytest.mark.parametrize("content", [pickled(), b"PK\3\4", b""])
def test_file_that_is_not_npz_is_never_unpickled(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.npz").write_bytes(content)
    with pytest.raises(UserError, match=r"x\.npz is not an \.npz file, or it is cut short"):
        read_tensors(tmp_path / "x.npz")


def test_npz_arrays_are_read_as_numpy_reads_them(tmp_path: Path) -> None:
    given = {
        "a": np.arange(6, dtype=">f2").reshape(2, 3), "b": np.asfortranarray(np.arange(6.0).reshape(2, 3)), "c": np.array(5),
        "../../d": np.zeros((0, 4), np.int8), "9" * 5000 + ".e": np.ones(1, np.uint16),
    }  # fmt: skip
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "x.npz", **given)
        read = read_tensors(tmp_path / "x.npz")
        assert sorted(read) == sorted(given)
        for name, values in given.items():
            assert torch.equal(read[name], torch.from_numpy(values.astype(values.dtype.newbyteorder("="))))
    assert [path.name for path in tmp_path.iterdir()] == ["x.npz"]


LINES: dict[str, tuple[str, str]] = {
    "deep": ("[" * 100_000 + "]" * 100_000, "line 1: no valid JSON"),
    "deep text": ('{"text": ' + "[" * 500 + "]" * 500 + "}", "line 1: needs a text in 'text' or 'prompt'"),
    "many digits": ('{"text": ' + "9" * 100_000 + "}", "line 1: no valid JSON"),
    "escape": ('{"text": "\x1b[2J"}', "line 1: no valid JSON"),
    "not a number": ('\n\n{"messages": [{"role": NaN, "content": 1}]}', "line 3: needs a text"),
    "half a pair": (
        '{"text": "\\ud800"}',
        "line 1: '\\\\\\\\ud800' has half of a pair of surrogates, which is not text",
    ),
}


@pytest.mark.parametrize("what", LINES)
def test_oversized_jsonl_entry_is_refused_with_its_line_number(what: str, tmp_path: Path) -> None:
    content, says = LINES[what]
    (tmp_path / "x.jsonl").write_text(content)

    def reading() -> None:
        samples = list(read_jsonl(tmp_path / "x.jsonl", de.InputLimits()))
        refuse_long(samples, [sample.text for sample in samples], de.InputLimits())

    with pytest.raises(UserError, match=rf"x\.jsonl, {says}"):
        reading()


def test_size_of_a_text_file_is_checked_before_reading(tmp_path: Path) -> None:
    """The file has 100 GB without a block on the disk. Reading it in this process would exhaust the memory."""
    path = tmp_path / "x.jsonl"
    with open(path, "wb") as file:
        file.truncate(100 << 30)
    for reading in (lambda: check_files(de.Options(texts=(path,))), lambda: list(read_jsonl(path, de.InputLimits()))):
        with pytest.raises(UserError, match=r"x\.jsonl, at 256 bytes per token, has 419,430,400 tokens"):
            reading()
    path.write_text("\n" * 1_000_000 + '{"text": "one\u2028two"}')
    found = list(read_jsonl(path, de.InputLimits()))
    assert found == [TextSample("one\u2028two", where=f"{path}, line 1000001")]


# -- full and closed disks ---------------------------------------------------------------------------------------------


@contextmanager
def full_disk() -> Iterator[None]:
    """Let no file grow beyond 100 bytes, which stands for a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_files_are_written_completely_or_not_at_all(tmp_path: Path) -> None:
    """Reports, recipes, saved scans and sessions are all written by this function."""
    path = tmp_path / "old.html"
    path.write_text("old")
    with full_disk():
        for target in (path, tmp_path / "new.html"):
            with pytest.raises(UserError, match=rf"can't write {target}: File too large"):
                write_text_atomic(target, "x" * 200_000, replace=True)
    with pytest.raises(UserError, match=r"can't write .*: a name in it is not Unicode"):
        write_text_atomic(path, "name \udcff", replace=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["old.html"]
    assert path.read_text() == "old"


@pytest.mark.parametrize("target", ["\0", "/proc/self/x/y", "/dev/full/x", "/dev/null"])
def test_unwritable_path_is_refused_in_one_sentence(target: str) -> None:
    with pytest.raises(UserError, match=r"can't write |there is no folder |exists; name another file"):
        check_target(Path(target))


def test_device_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="is a device or a pipe, which a file would replace; name another file"):
        write_text_atomic(tmp_path / "pipe", "text", replace=True)
    assert [entry.is_fifo() for entry in tmp_path.iterdir()] == [True]


def test_full_output_device_is_reported_in_one_sentence() -> None:
    code = f"import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 1); {preloaded.COMMAND}"
    done = preloaded.run(code, "inspect", "--json")
    assert done.returncode == BAD_INPUT
    assert done.stderr == "dtype-engine: standard output can't be written: No space left on device\n"


# -- names that are not UTF-8 -------------------------------------------------------------------------------------------


def test_model_folder_whose_name_is_not_utf_8_is_opened(make_llama: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"odd\xffname")
    make_llama().rename(folder)
    assert de.open(str(folder), options=de.Options(device="cpu")).model.title == "odd\\udcffname"


def test_pytorch_file_whose_name_is_not_utf_8_is_refused_for_that_reason(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "x.pth")
    odd = (tmp_path / "x.pth").rename(tmp_path / os.fsdecode(b"x\xff.pth"))
    done = preloaded.run(preloaded.COMMAND, "inspect", str(odd))
    assert done.returncode == BAD_INPUT
    assert "x\\udcff.pth: this name is not UTF-8, which torch needs to read a file: rename it\n" in done.stderr


# -- an engine that is halted ------------------------------------------------------------------------------------------


def test_request_cancelled_before_the_engine_thread_runs_is_reported_as_stopped() -> None:
    """The thread of the engine has not run since the request, as after SIGSTOP."""
    told: list[events.Event] = []
    worker = Worker(locate(None), de.Options(), told.append)
    worker._opened.set()
    worker.request(SetRecipe(RECIPE))
    worker.request(Cancel())
    assert [type(event) for event in told[-3:]] == [events.Stopped, events.Jobs, events.Idle]


@pytest.mark.slow
def test_paused_engine_resumes_without_a_partial_export(tmp_path: Path) -> None:
    """SIGSTOP pauses the engine. What is cancelled meanwhile ends in `Idle`. If it is paused while it writes an export, and the app
    is then left, nothing has the export's name.
    """
    number, out = tmp_path / "number", tmp_path / "out"
    code = f"import os; open({str(number)!r}, 'w').write(str(os.getpid())); {preloaded.ENGINE}"
    recorded = RecordedProcess(EngineCommand(preloaded.command(code)), "demo", de.Options(device="cpu"))
    recorded.worker.start()
    try:
        recorded.wait_for(events.Idle)
        engine = psutil.Process(int(number.read_text()))
        engine.suspend()
        since = len(recorded.events)
        recorded.worker.request(SetRecipe(RECIPE))
        recorded.worker.request(Cancel())
        engine.resume()
        recorded.wait_for(events.Idle, since=since, seconds=30)
        since = len(recorded.events)
        recorded.worker.request(SetRecipe(RECIPE))
        assert recorded.measured(RECIPE, since)
        recorded.on_event = lambda event: engine.suspend() if isinstance(event, events.SavingProgress) else None
        recorded.worker.save(ExportRequest(out))
        recorded.wait_for(events.SavingProgress, since=since)
    finally:
        recorded.worker.close()
    engine.wait(10)
    number.unlink()
    for left in tmp_path.iterdir():
        assert left.name.startswith(".out.partial-")
        os.utime(left, (0, 0))  # an empty one is left alone for a while, since its writer may be about to lock it
    recover_stale(out)  # as the next export does
    assert list(tmp_path.iterdir()) == []
