"""Models on a hub of which only headers are read, compared with the same files on disk, and hubs with wrong responses."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import re
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.helpers import large_checkpoints, preloaded
from tests.helpers.gguf_files import gguf_file
from tests.helpers.hub_server import COMMIT, Hub, Request, hub_of
from tests.helpers.quantized import CASES
from tests.matrix.forms import FORMS, made

import dtype_engine as de
from dtype_engine.checkpoint import hub as reading
from dtype_engine.checkpoint import hub_reader, open_checkpoint
from dtype_engine.checkpoint.hub import HubAddress
from dtype_engine.checkpoint.source import Source, component_of, locate
from dtype_engine.cli import cli
from dtype_engine.cli.program import run
from dtype_engine.core.errors import Cancelled, UserError

MODEL = "hf://org/name"
Serve = Callable[[Path], Hub]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Return a function that serves a folder as the model `org/name` of a hub until the test ends."""
    running: list[AbstractContextManager[Hub]] = []

    def begin(folder: Path) -> Hub:
        running.append(hub_of(tmp_path / "cache", org__name=folder))
        return running[-1].__enter__()

    yield begin
    for each in running:
        each.__exit__(None, None, None)


def rows(source: Source) -> list[tuple[object, ...]]:
    """Return name, shape, dtype and so on of each tensor of the tree."""
    checkpoint = source.open()
    assert checkpoint is not None
    tree = checkpoint.tree()
    return [
        (each.name, each.shape, each.dtype, each.nbytes, each.aliases, each.uncastable_reason, each.castable)
        for each in tree.tensors.values()
    ]


FOLDERS = (
    "folder, sharded",
    "folder, experts",
    "diffusers",
    "adapter",
    "GPTQ",
    "AWQ",
    "bitsandbytes",
    "compressed-tensors",
    "fp8 blocks",
)


@pytest.mark.slow
@pytest.mark.parametrize("form", FOLDERS)
def test_tree_from_hub_headers_equals_the_tree_of_the_downloaded_files(tmp_path: Path, serve: Serve, form: str) -> None:
    here = made(form, tmp_path / "made").model
    hub = serve(Path(here))
    assert rows(locate(MODEL)) == rows(locate(here))
    before = len(hub.requests)
    assert rows(locate(MODEL)) == rows(locate(here))
    assert len(hub.requests) == before + 1, "the headers are kept, and only the commit is asked for"


@pytest.mark.slow
def test_small_tensors_that_describe_quantized_weights_are_read_from_the_hub(tmp_path: Path, serve: Serve) -> None:
    hub = serve(tmp_path)
    for number, (name, make) in enumerate(CASES.items()):
        make().save(tmp_path / str(number))
        hub.repositories[f"org/case{number}"] = tmp_path / str(number)
        here, there = open_checkpoint(tmp_path / str(number)), locate(f"hf://org/case{number}").open()
        assert there is not None
        assert here.coded.keys() == there.coded.keys() != set(), name
        for weight, found in there.coded.items():
            expected = here.coded[weight]
            assert (found.format, found.shape, found.settings) == (expected.format, expected.shape, expected.settings)
            assert found.parts["codes"].bytes is None, name


@pytest.mark.slow
def test_hub_address_must_name_one_of_several_gguf_files(
    tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_FIRST_GGUF_RANGE", 64)  # so that the header takes several ranges
    folder = tmp_path / "made"
    folder.mkdir()
    files = [FORMS[form](folder).model for form in ("GGUF F16", "GGUF Q4_K")]
    hub = serve(folder)
    with pytest.raises(UserError, match=r"has 2 GGUF files; name one of them, such as hf://org/name/tiny-f16.gguf"):
        locate(MODEL)
    for file in files:
        name = Path(file).name
        assert rows(locate(f"{MODEL}/{name}")) == rows(locate(file))
        assert sum(name in path for path in hub.paths()) > 2


@pytest.mark.parametrize("at", ["", "/x-00002-of-00003.gguf"])
def test_gguf_parts_on_a_hub_open_as_one_model(tmp_path: Path, serve: Serve, at: str) -> None:
    folder = tmp_path / "made"
    folder.mkdir()
    with gguf_file(folder / "x.gguf", "other", split_max_tensors=2) as writer:
        for number in range(6):
            writer.add_tensor(f"blk.{number}.weight", np.full((2, 8), number, np.float32))
    serve(folder)
    found = locate(MODEL + at).open()
    assert found is not None
    assert list(found.tensors) == [f"blk.{number}.weight" for number in range(6)]


@pytest.mark.slow
def test_headers_of_a_671b_model_are_read_from_a_hub(tmp_path: Path, serve: Serve) -> None:
    giant = large_checkpoints.write(tmp_path / "giant")
    hub = serve(giant)
    hub.delay_s = 0.03
    connections: set[object] = set()
    hub.fault = lambda request: bool(connections.add(request.client_address))  # type: ignore[func-returns-value]
    source = locate(MODEL)
    assert len(connections) <= 17, "a connection is used for many requests"
    assert hub.sent <= 30_000_000
    assert len(hub.requests) == 1 + len(list(giant.iterdir())), "one request reads the header of a shard"
    assert source.path is not None
    for file in giant.iterdir():
        size = os.path.getsize(file)
        mine = source.path / file.name
        assert os.path.getsize(mine) == size
        with open(file, "rb") as theirs, open(mine, "rb") as ours:
            length = size if file.suffix == ".json" else 8 + int.from_bytes(theirs.read(8), "little")
            theirs.seek(0)
            assert theirs.read(length) == ours.read(length)
    tree, whole = source.peek()
    assert tree is not None
    assert len(tree.tensors) > 50
    assert not [name for name in tree.tensors if name.endswith("_scale_inv")], "scales are parts of weights"
    assert not whole
    written = sum(file.stat().st_blocks * 512 for file in source.path.iterdir())
    assert written < 40_000_000


# -- what needs the values ------------------------------------------------------------------------------------------------

REFUSED = (
    "check MODEL --values", "weights MODEL --cast *=f16", "weights MODEL --against HERE", "weights HERE --against MODEL",
    "drift MODEL", "drift MODEL --against HERE", "drift HERE --against MODEL", "flow MODEL", "scan MODEL",
    "search MODEL --budget 50%",
    "export MODEL --cast *=f16 -o OUT", "verify HERE --against MODEL", "speed MODEL",
)  # fmt: skip


@pytest.mark.slow
def test_command_that_needs_weights_says_how_to_download_them(
    make_llama: Callable[..., Path], serve: Serve, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = make_llama()
    hub = serve(folder)
    capfd.readouterr()
    for line in REFUSED:
        words = line.replace("MODEL", MODEL).replace("HERE", str(folder)).replace("OUT", str(tmp_path / "out")).split()
        assert run(cli, "dtype-engine", words) == 2, line
        captured = capfd.readouterr()
        assert captured.err.count("\n") == 1, line
        assert "only the headers of hf://org/name are here, not its" in captured.err, line
        assert "--download fetches the model" in captured.err, line
        assert captured.out == "", line
    assert not (tmp_path / "out").exists()
    wanted = [(path, span) for _, path, span in hub.requests if path.endswith(".safetensors")]
    first = min(reading._FIRST_RANGE, os.path.getsize(folder / "model.safetensors"))
    assert [span for _, span in wanted] == [f"bytes=0-{first - 1}"], "nothing but a header was read"


@pytest.mark.slow
def test_hub_model_opens_from_headers_and_later_from_its_download(
    make_llama: Callable[..., Path], serve: Serve, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = make_llama()
    serve(folder)

    def said(*words: str) -> dict[str, object]:
        assert run(cli, "dtype-engine", [*words, "--json"]) == 0
        return dict(json.loads(capfd.readouterr().out))

    there, here = (said("inspect", model, "--cast", "*.mlp=fp8") for model in (MODEL, str(folder)))
    assert there.pop("on_hub") == {"download_bytes": os.path.getsize(folder / "model.safetensors"), "fits_memory": True}
    for part in ("tensors", "modules", "planned_bytes", "dtypes", "found"):
        assert there[part] == here[part]
    assert said("check", MODEL)["findings"] == []
    presets, local = (said("recipe", "presets", model)["presets"] for model in (MODEL, str(folder)))
    assert presets == local
    steps: list[tuple[int, int]] = []
    found = HubAddress.parse(MODEL).listing()
    with pytest.raises(de.NoForward, match="only the headers of hf://org/name are here"):
        de.open(MODEL)
    with pytest.raises(Cancelled):
        found.download(cancelled=lambda: True)
    assert found.downloaded(tmp_path / "cache" / "hub") is None
    found.download(lambda what, done, total: steps.append((done, total)))
    assert steps[-1] == (sum(file.stat().st_size for file in folder.iterdir()),) * 2
    assert said("inspect", MODEL)["on_hub"] is None
    assert de.open(MODEL).model.title == "org/name"
    plain = said("drift", str(folder), "--cast", "*.mlp=fp8")
    assert said("drift", MODEL, "--cast", "*.mlp=fp8")["output"] == plain["output"]


# -- a hub that does not do as it should ---------------------------------------------------------------------------------


def status(code: int, reason: str = "", of: str = "") -> Callable[[Request], bool]:
    def fault(request: Request) -> bool:
        if of in request.path:
            request.refuse(code, reason)
        return of in request.path

    return fault


def body(content: bytes, of: str, code: int = 200, **headers: str) -> Callable[[Request], bool]:
    def fault(request: Request) -> bool:
        if of in request.path:
            request.send(code, content, {name.replace("_", "-"): value for name, value in headers.items()})
        return of in request.path

    return fault


def silent(request: Request) -> bool:
    request.close_connection = True
    return True


def listed(*files: object, sha: str = COMMIT) -> Callable[[Request], bool]:
    return body(json.dumps({"sha": sha, "siblings": list(files)}).encode(), "/api/")


def tensors(size: int, name: str = "model.safetensors") -> dict[str, object]:
    return {"rfilename": name, "size": size}


def too_large(request: Request) -> bool:
    first = reading._FIRST_RANGE
    span = body(b"x" * first, ".safetensors", 206, Content_Range=f"bytes 0-{first - 1}/{1 << 62}")
    return listed(tensors(1 << 62))(request) or span(request)


def endless(request: Request, code: int) -> bool:
    request.send_response(code)
    request.send_header("Transfer-Encoding", "chunked")
    request.end_headers()
    with suppress(OSError):
        while True:
            request.wfile.write(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
    request.close_connection = True
    return True


HEADER = struct.pack("<Q", 2) + b"{}"
FAULTS = {
    "no such model": (status(404, "RepoNotFound"), "the hub has no such model, or it is private"),
    "private": (status(401), r"the hub answered with status 401: it asks for a token \(HF_TOKEN"),
    "gated": (status(403, "GatedRepo"), "is gated: accept its conditions on the hub"),
    "forbidden": (status(403, of=".safetensors"), "the hub answered with status 403: the token may not read it"),
    "no such revision": (status(404, "RevisionNotFound"), "the model has no revision main"),
    "a file is gone": (status(404, "EntryNotFound", of=".safetensors"), "the hub answered with status 404: there is no such file"),
    "broken": (status(500), "the hub answered with status 500"),
    "broken, with a list": (body(b"[1]", "/api/", 500), "the hub answered with status 500$"),
    "broken, without an end": (lambda request: endless(request, 500), "the hub answered with status 500$"),
    "too many requests": (status(429), "the hub answered with status 429: it allows no more requests for now"),
    "a list without an end": (lambda request: endless(request, 200), "its answer has over 1,000,000 bytes"),
    "compressed twice": (body(b"x", "/api/", Content_Encoding="gzip, gzip"), "its answer is compressed as gzip, gzip"),
    "compressed and cut": (
        body(gzip.compress(b"x" * 2224)[:20], ".safetensors", 206, Content_Encoding="gzip"),
        "its answer ends after|decompress",
    ),
    "redirected in a circle": (
        body(b"", "", 302, Location="/api/models/org/name/revision/main"),
        "can't be trusted: it redirects over 10 times",
    ),
    "redirected to a file": (
        body(b"", ".safetensors", 302, Location="file:///etc/passwd"),
        "what the hub says of model.safetensors can't be trusted: it redirects to what is no address of a server",
    ),
    "redirected to no address": (body(b"", "/api/", 302, Location="http://["), "it redirects to what|be reached"),
    "silent": (silent, "the hub can't be reached: "),
    "no JSON": (body(b"<html>", "/api/"), "the hub's list of files can't be read"),
    "no list": (body(b'{"sha": 1}', "/api/"), "the hub's list of files can't be read"),
    "deep JSON": (body(b"[" * 100_000, "/api/"), "the hub's list of files can't be read"),
    "no commit": (listed(sha="../../x"), "the hub names no commit: '../../x'"),
    "no files": (listed(), "it has no weights in a known form, so nothing can be read"),
    "no sizes": (listed({"rfilename": "model.safetensors"}), "the hub does not say how large model.safetensors is"),
    "a negative size": (listed(tensors(-1)), r"siblings\[0\].size: expected int >= 0"),
    "a size beyond any file system": (listed(tensors(10**400)), r"siblings\[0\].size: expected int <= 9223372036854775807"),
    "a text for a size": (listed({"rfilename": "a", "size": "9"}), r"siblings\[0\].size: expected int \| null, got str"),
    "texts for files": (listed("a"), r"siblings\[0\]: expected object, got str"),
    "a text for a large file": (listed({"rfilename": "a", "lfs": "x"}), r"siblings\[0\].lfs: expected object \| null, got str"),
    "many files": (listed(*map(tensors, range(6))), "the hub lists 6 files, over the limit of 5"),
    "another config of the same size": (
        body(b'{"model_type": "lemma"}', "config.json"),
        "what the hub says of config.json can't be trusted: its content has another digest",
    ),
    "a range of 5,000 digits": (
        body(HEADER, ".safetensors", 206, Content_Range=f"bytes {'9' * 5000}-1/2224"),
        "can't be trusted: its answer ends after 10 of 2,224 bytes",
    ),
    "pickles": (listed(tensors(9, "pytorch_model.bin")), "its weights are pickles, which have no header, .* --download fetches"),
    "names out of the folder": (
        listed(tensors(9, "../model.safetensors"), tensors(9, "/a.safetensors")),
        "no weights in a known form",
    ),
    "a file too large for any disk": (too_large, "can't write headers to"),
    "a file that is a folder, too": (
        listed(tensors(9), tensors(9, "model.safetensors.json"), tensors(9, "model.safetensors/config.json")),
        "the hub's list of files contradicts itself: model.safetensors is a file and a folder",
    ),
    "a message that is not ASCII": (
        body(b"", "/api/", 404, X_Error_Code="RepoNotFound", X_Error_Message="nicht gefunden: \xfc"),
        "the hub has no such model, or it is private",
    ),
    "another size": (
        listed(tensors(5000)),
        "what the hub says of model.safetensors can't be trusted: its list of files says 5,000 bytes, its answer",
    ),
    "another range": (
        body(b"x" * 9, ".safetensors", 206, Content_Range="bytes 7-15/2224"),
        "can't be trusted: its answer begins at byte 7, although byte 0 was asked for",
    ),
    "too few bytes": (
        body(HEADER, ".safetensors", 206, Content_Range="bytes 0-2223/2224"),
        "can't be trusted: its answer ends after 10 of 2,224 bytes",
    ),
    "a header of 8 EB": (
        body(b"\xff" * 2224, ".safetensors"),
        "the header claims 18446744073709551615 bytes, over the limit",
    ),
    "a header that is no JSON": (
        body(struct.pack("<Q", 9) + b"x" * 2216, ".safetensors"),
        "hf://org/name/model.safetensors: .*JSON",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_every_hub_failure_is_reported_in_one_line(
    serve: Serve, small: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setattr(hub_reader, "_PAUSE_S", 0.0)
    monkeypatch.setattr(reading, "_LARGEST_LISTING", 1_000_000)
    monkeypatch.setattr(reading, "_MOST_LISTED", 5)
    hub = serve(small)
    assert os.path.getsize(small / "model.safetensors") == 2224
    hub.fault, words = FAULTS[name]
    assert run(cli, "dtype-engine", ["inspect", MODEL]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("dtype-engine: ")
    assert re.search(words, captured.err), captured.err


def test_path_of_cached_hub_headers_is_not_opened_as_a_checkpoint(serve: Serve, small: Path) -> None:
    serve(small)
    path = locate(MODEL).path
    assert path is not None
    for text in (str(path), str(path / "model.safetensors")):
        with pytest.raises(UserError, match="has the headers of a model on a hub and no weights"):
            locate(text)
    assert component_of(f"{MODEL}@v1", "vae") == f"{MODEL}@v1/vae"


def test_missing_network_or_permission_is_reported(serve: Serve, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(hub_reader, "_PAUSE_S", 0.0)
    hub = serve(small)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(UserError, match="the hub can't be reached: "):
        locate(MODEL)
    monkeypatch.setattr(constants, "ENDPOINT", hub.address)
    for address in (
        "hub",
        "http://",
        "http://\x01",
        "http://[::x",
        "file:///tmp",
        "http://a b",
        "http://a:99999",
        "http://a/?b",
    ):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        with pytest.raises(UserError, match="HF_ENDPOINT is no address of a server"):
            locate(MODEL)
    monkeypatch.setattr(constants, "ENDPOINT", hub.address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE forbids asking the hub"):
        locate(MODEL)
    assert hub.requests == []


def test_password_in_the_address_of_the_hub_is_sent_and_not_shown_or_stored(
    serve: Serve, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from huggingface_hub import constants

    caplog.set_level("DEBUG")
    hub = serve(small)
    sent: list[str | None] = []
    hub.fault = lambda request: bool(sent.append(request.headers.get("authorization")))  # type: ignore[func-returns-value]
    with_password = hub.address.replace("://", "://me:s3cret%40x@")
    monkeypatch.setattr(constants, "ENDPOINT", with_password)
    assert rows(locate(MODEL)) == rows(locate(str(small)))
    assert set(sent) == {"Basic bWU6czNjcmV0QHg="}
    assert not [path for path in (tmp_path / "cache").rglob("*") if "s3cret" in str(path)]
    for address in (
        f"{with_password}:1",
        "http://me:s3cret@",
        "http://me:s3cret/x@host",
        "me:s3cret@host",
        "http://me:s3cret@[::1",
    ):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        with pytest.raises(UserError, match="HF_ENDPOINT is no address of a server") as found:
            locate(MODEL)
        assert "s3cret" not in str(found.value)
    assert "s3cret" not in caplog.text


@pytest.mark.slow
def test_headers_of_hubs_with_similar_addresses_are_kept_apart(serve: Serve, small: Path, tmp_path: Path) -> None:
    hub = serve(small)
    model = HubAddress.parse(MODEL).listing()
    model.headers()
    asked = len(hub.requests)
    other = dataclasses.replace(model, endpoint=hub.address.replace("127.0.0.1:", "127-0-0-1-"))
    with pytest.raises(UserError, match="the hub can't be reached"):
        other.headers()
    model.headers()
    assert len(hub.requests) == asked


def test_files_with_unsafe_names_are_said_to_be_left_out(
    serve: Serve, small: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    files = [{"rfilename": file.name, "size": file.stat().st_size} for file in small.iterdir()]
    odd = [
        {"rfilename": name, "size": 2}
        for name in ("../up.json", "a\x1b[2J.jinja", "x\u202e.safetensors", "notes\x07.md")
    ]
    serve(small).fault = listed(*files, *odd)
    for words in (["inspect", MODEL], ["inspect", MODEL, "--download"], ["inspect", MODEL]):
        assert run(cli, "dtype-engine", words) == 0
        said = capfd.readouterr().err
        assert (
            r"note: files whose names are not safe here are left out: ../up.json, a\x1b[2J.jinja, x\u202e.safetensors"
            in said
        )
        assert "notes" not in said


@pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="the system has no CPU clock of a thread")
def test_endless_interim_responses_of_a_hub_are_ended_with_an_error(
    serve: Serve, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_reader, "_MOST_CPU_S", 0.2)
    hub, ended = serve(small), threading.Event()

    def endless(request: Request) -> bool:
        with suppress(OSError):
            while True:
                request.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000)
        ended.set()
        return silent(request)

    hub.fault = endless
    with pytest.raises(UserError, match="the hub sends too much before the headers of its answer"):
        locate(MODEL)
    assert ended.wait(10), "the connection is closed"


@pytest.mark.slow
@pytest.mark.parametrize("address", ["http://127.0.0.1:99999", "http://[::1"])
def test_address_that_huggingface_hub_cannot_import_with_is_reported(address: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", preloaded.COMMAND, "inspect", MODEL],
        env=os.environ | {"HF_ENDPOINT": address},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2
    assert ended.stderr == f"dtype-engine: HF_ENDPOINT is no address of a server: {address}\n"


def test_request_to_a_silent_hub_times_out_and_an_interrupted_request_is_repeated(
    serve: Serve, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(hub_reader, "_PAUSE_S", 0.0)
    monkeypatch.setattr(hub_reader, "_TRIES", 2)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    hub = serve(small)
    hub.delay_s = 0.5
    with pytest.raises(UserError, match="did not answer in time; HF_HUB_DOWNLOAD_TIMEOUT sets the seconds"):
        locate(MODEL)
    hub.delay_s, before = 0.0, len(hub.requests)
    broken: list[str] = []

    def once(request: Request) -> bool:
        if request.path in broken:
            return False
        broken.append(request.path)
        return silent(request)

    hub.fault = once
    assert len(rows(locate(MODEL))) == 2
    assert len(hub.requests) - before == 2 * len(broken), "each request is made again once"


def test_hub_sending_byte_by_byte_times_out(serve: Serve, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(hub_reader, "_SLOWEST", 100_000)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    over = threading.Event()

    def fault(request: Request) -> bool:
        request.send_response(200)
        request.end_headers()
        with suppress(OSError):
            while not over.wait(0.05):
                request.wfile.write(b" ")
        return True

    serve(small).fault = fault
    monkeypatch.setattr(reading, "_LARGEST_LISTING", 1_000)
    with pytest.raises(UserError, match="the hub sends less than 100,000 bytes per second"):
        locate(MODEL)
    over.set()


def test_download_stops_at_the_announced_size_and_sends_no_token_to_other_hosts(
    serve: Serve, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_token_of_the_test")
    hub = serve(small)
    model = HubAddress.parse(MODEL).listing()
    hub.fault = lambda request: (
        request.command == "GET" and request.path.endswith(".safetensors") and endless(request, 200)
    )
    with pytest.raises(
        UserError, match=r"what the hub says of model.safetensors can't be trusted: its answer has over 2,224 bytes"
    ):
        model.download()
    assert model.downloaded(tmp_path / "cache" / "hub") is None
    assert sum(file.stat().st_size for file in (tmp_path / "cache").rglob("*") if file.is_file()) < 100_000
    tokens: list[tuple[bool, str | None]] = []

    def elsewhere(request: Request) -> bool:
        tokens.append((away := request.path == "/elsewhere", request.headers.get("authorization")))
        if away:
            request.answer_file(small / "model.safetensors")
        elif request.path.endswith(".safetensors"):
            there = f"{hub.address.replace('127.0.0.1', 'localhost')}/elsewhere"
            size = str(os.path.getsize(small / "model.safetensors"))
            more = {"X-Repo-Commit": COMMIT, "X-Linked-Size": size, "X-Linked-Etag": '"x"'}
            request.send(302, b"", {"Location": there, **more})
        return away or request.path.endswith(".safetensors")

    hub.fault = elsewhere
    assert os.path.getsize(model.download() / "model.safetensors") == 2224
    assert {token for away, token in tokens if away} == {None}
    assert {token for away, token in tokens if not away} == {"Bearer hf_token_of_the_test"}
    assert not caplog.records, "what a server says is not logged"


def test_header_longer_than_the_first_range_is_read_with_a_second_request(tmp_path: Path, serve: Serve) -> None:
    folder = tmp_path / "long"
    folder.mkdir()
    save_file({f"layers.{index}.weight": torch.ones(1) for index in range(3000)}, folder / "model.safetensors")
    hub = serve(folder)
    assert rows(locate(MODEL)) == rows(locate(str(folder)))
    length = 8 + int.from_bytes((folder / "model.safetensors").read_bytes()[:8], "little")
    spans = [span for _, path, span in hub.requests if path.endswith(".safetensors")]
    first = reading._FIRST_RANGE
    assert spans == [f"bytes=0-{first - 1}", f"bytes={first}-{length - 1}"]


def test_hub_headers_are_read_after_a_redirect_without_sending_the_token(
    serve: Serve, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = serve(small)
    content = (small / "model.safetensors").read_bytes()

    def fault(request: Request) -> bool:
        if request.path.endswith("/elsewhere"):
            assert "authorization" not in request.headers
            request.send(200, content)
        elif request.path.endswith(".safetensors"):
            request.send(302, b"", {"Location": f"{hub.address.replace('127.0.0.1', 'localhost')}/elsewhere"})
        else:
            return False
        return True

    hub.fault = fault
    monkeypatch.setenv("HF_TOKEN", "hf_token_of_the_test")
    assert rows(locate(MODEL)) == rows(locate(str(small)))


def test_hub_answers_without_a_content_length_are_read(serve: Serve, small: Path) -> None:
    hub = serve(small)

    def fault(request: Request) -> bool:
        if request.path.endswith("config.json"):
            request.send(200, gzip.compress((small / "config.json").read_bytes()), {"Content-Encoding": "gzip"})
        elif request.path.endswith(".safetensors"):
            content = (small / "model.safetensors").read_bytes()
            request.send_response(200)
            request.send_header("Transfer-Encoding", "chunked")
            request.end_headers()
            request.wfile.write(f"{len(content):x}\r\n".encode() + content + b"\r\n0\r\n\r\n")
        else:
            return False
        return True

    hub.fault = fault
    found, expected = locate(MODEL), locate(str(small))
    assert rows(found) == rows(expected)
    assert found.open().config == {"model_type": "llama"}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "repo", "revision", "path"),
    [
        ("hf://a/b", "a/b", None, ""),
        ("hf://models/a/b/", "a/b", None, ""),
        ("hf://a/b.c@v1.0", "a/b.c", "v1.0", ""),
        ("hf://a/b@refs/pr/7/unet", "a/b", "refs/pr/7", "unet"),
        ("hf://a/b@feature%2Fx/c/d.gguf", "a/b", "feature/x", "c/d.gguf"),
    ],
)
def test_hub_addresses_are_parsed(text: str, repo: str, revision: str | None, path: str) -> None:
    found = HubAddress.parse(text)
    assert found == HubAddress(repo, revision, path)
    assert HubAddress.parse(str(found)) == found


@pytest.mark.parametrize(
    "text",
    [
        "hf://",
        "hf://a",
        "hf://../b",
        "hf://a/b/../c",
        "hf://a/b@",
        "hf://a/b/\x1b[2J",
        "hf://a/..",
        "hf://a/b/c\\d",
        "hf://a/b/%2e%2e/c",
        "hf://a--b/c",
        "hf://a/b..c",
    ],
)
def test_invalid_hub_address_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="is no address of a model on a hub"):
        HubAddress.parse(text)


def test_hub_headers_come_from_the_weights_that_transformers_loads(
    tmp_path: Path, serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "both"
    folder.mkdir()
    save_file({"a.weight": torch.ones(4, 8, dtype=torch.bfloat16)}, folder / "model.safetensors")
    save_file({"a.weight": torch.ones(4, 8)}, folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"a.weight": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    serve(folder)
    assert rows(locate(MODEL)) == rows(locate(str(folder)))
    assert run(cli, "dtype-engine", ["inspect", MODEL]) == 0
    said = capsys.readouterr().out
    assert "bf16" in said
    assert "model.safetensors is read, as transformers does, and model.safetensors.index.json is not" in said


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_fp16_variant_beside_pickles_on_a_hub_is_not_read(name: str, tmp_path: Path, serve: Serve) -> None:
    folder = tmp_path / "pickles"
    folder.mkdir()
    save_file({"a.weight": torch.ones(2)}, folder / "model.fp16.safetensors")
    torch.save({"a.weight": torch.zeros(2)}, folder / "pytorch_model.bin")
    if name.endswith(".json"):
        (folder / "pytorch_model.bin").rename(folder / "pytorch_model-00001-of-00001.bin")
        (folder / name).write_text(json.dumps({"weight_map": {"a.weight": "pytorch_model-00001-of-00001.bin"}}))
    serve(folder)
    with pytest.raises(UserError, match="its weights are pickles"):
        locate(MODEL)
    assert float(open_checkpoint(locate(MODEL, download=True).path or folder).values["a.weight"][0]) == 0  # type: ignore[index]
