"""Downloads from a hub with wrong responses, and the resulting cache as read by huggingface_hub and transformers."""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import json
import os
import subprocess
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.helpers.hub_server import COMMIT, Hub, Request, hub_of
from tests.helpers.hub_server import digest as blob_digest

from dtype_engine.checkpoint import hub as addresses
from dtype_engine.checkpoint import hub_cache, hub_reader
from dtype_engine.checkpoint.hub import HubAddress
from dtype_engine.checkpoint.source import locate
from dtype_engine.core.errors import UserError

MODEL = "hf://org/name"
BOTH = (MODEL, "org/name")
"""The two ways to name a model that `--download` fetches."""
Fault = Callable[[Request], bool]


@pytest.fixture
def hub(tmp_path: Path, small: Path) -> Iterator[Hub]:
    with hub_of(tmp_path / "cache", org__name=small) as running:
        yield running


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() or path.is_symlink()}


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in files(folder)}


def with_headers(small: Path, **headers: str) -> Fault:
    """Return a fault that adds headers to the response for every file."""

    def fault(request: Request) -> bool:
        if "/resolve/" in request.path:
            content = (small / request.path.rpartition("/")[2]).read_bytes()
            said = {"X-Repo-Commit": COMMIT, "ETag": '"x"'} | {
                key.replace("_", "-"): text for key, text in headers.items()
            }
            request.send(200, content, said)
        return "/resolve/" in request.path

    return fault


OUT = "../../../../evil.pth"
HEADERS: dict[str, dict[str, str]] = {
    "ETag": {"ETag": f'"{OUT}"'},
    "ETag, absolute": {"ETag": '"/ROOT/evil.pth"'},
    "ETag, weak": {"ETag": f'W/"{OUT}"'},
    "ETag, too long": {"ETag": f'"{"x" * 5000}"'},
    "X-Linked-Etag": {"X-Linked-Etag": f'"{OUT}"'},
    "X-Repo-Commit": {"X-Repo-Commit": "../../../../../evil"},
    "X-Xet-Hash": {"X-Xet-Hash": OUT, "X-Xet-Refresh-Route": "/x"},
}


@pytest.mark.parametrize("model", BOTH)
@pytest.mark.parametrize("name", HEADERS)
def test_response_headers_cannot_name_a_file(tmp_path: Path, small: Path, hub: Hub, name: str, model: str) -> None:
    hub.fault = with_headers(small, **{key: text.replace("ROOT", str(tmp_path)) for key, text in HEADERS[name].items()})
    before = files(tmp_path)
    found = locate(model, download=True).path
    assert found is not None
    assert contents(found) == contents(small)
    new = files(tmp_path) - before
    assert all(path.startswith("cache/hub/models--org--name/") for path in new), new
    assert not [path for path in new if "evil" in path or ".." in path]


DIGESTS = {
    "a path": {"blobId": OUT},
    "a path, of a large file": {"blobId": "c0ffee", "lfs": {"sha256": OUT}},
    "dots": {"blobId": ".."},
    "nothing": {"blobId": ""},
    "too long": {"blobId": "0" * 5000},
    "not a digest": {"blobId": "model.safetensors"},
}


@pytest.mark.parametrize("name", DIGESTS)
def test_digest_from_the_hub_cannot_name_a_path_outside_the_cache(
    tmp_path: Path, small: Path, hub: Hub, name: str
) -> None:
    listed = [{"rfilename": file.name, "size": file.stat().st_size} | DIGESTS[name] for file in small.iterdir()]
    answer = json.dumps({"sha": COMMIT, "siblings": listed}).encode()
    hub.fault = lambda request: bool(request.path.startswith("/api/") and (request.send(200, answer) or True))
    before = files(tmp_path)
    found = locate(MODEL, download=True).path
    assert found is not None
    assert contents(found) == contents(small)
    snapshot = f"cache/hub/models--org--name/snapshots/{COMMIT}"
    names = {f"{snapshot}/{file.name}" for file in small.iterdir()}
    assert files(tmp_path) - before == {*names, "cache/hub/models--org--name/refs/main"}


def test_only_model_files_with_safe_names_are_downloaded(small: Path, hub: Hub) -> None:
    (small / "evil\x1b]0;.json").write_text("{}")
    (small / "notes.md").write_text("no part of the model")
    found = locate(MODEL, download=True).path
    assert found is not None
    assert files(found) == {"config.json", "model.safetensors"}
    listings = [path for path in hub.paths() if path.startswith("/api/")]
    assert len(listings) == 1
    assert "/tree/" not in listings[0]
    assert len(hub.requests) == 3


def test_hub_cache_is_readable_by_other_programs(
    tmp_path: Path, small: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers
    from huggingface_hub import constants, scan_cache_dir, snapshot_download, try_to_load_from_cache

    found = locate("org/name", download=True).path
    assert found is not None
    hub.fault = lambda request: pytest.fail("everything is there")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    cache = str(tmp_path / "cache" / "hub")
    assert snapshot_download("org/name", cache_dir=cache) == str(found)
    assert try_to_load_from_cache("org/name", "config.json", cache_dir=cache) == str(found / "config.json")
    assert transformers.AutoConfig.from_pretrained("org/name", cache_dir=cache).model_type == "llama"
    scanned = scan_cache_dir(cache)
    assert not scanned.warnings
    (repository,) = scanned.repos
    assert repository.repo_id == "org/name"
    assert repository.size_on_disk == sum(file.stat().st_size for file in small.iterdir())
    (revision,) = repository.revisions
    assert (revision.commit_hash, revision.refs) == (COMMIT, {"main"})


def test_files_cached_for_an_older_commit_are_not_downloaded_again(tmp_path: Path, small: Path, hub: Hub) -> None:
    """Both commits have the same files, which huggingface_hub downloaded for the older commit."""
    from huggingface_hub import snapshot_download

    older = Path(snapshot_download("org/name", cache_dir=str(tmp_path / "cache" / "hub"), revision=COMMIT))
    hub.requests.clear()
    newer = "abcdef0" * 5 + "abcde"
    digests = {file.name: os.path.basename(os.path.realpath(older / file.name)) for file in small.iterdir()}
    listed = [
        {"rfilename": name, "size": (small / name).stat().st_size, "blobId": blob} for name, blob in digests.items()
    ]
    answer = json.dumps({"sha": newer, "siblings": listed}).encode()
    hub.fault = lambda request: bool(request.path.startswith("/api/") and (request.send(200, answer) or True))
    steps: list[tuple[int, int]] = []
    found = HubAddress.parse(MODEL).listing().download(lambda what, done, total: steps.append((done, total)))
    assert found.name == newer
    assert contents(found) == contents(small)
    assert len(hub.requests) == 1, "only the list of files was asked for"
    assert steps[-1] == (sum(file.stat().st_size for file in small.iterdir()),) * 2


def test_hub_cache_works_on_a_file_system_without_symlinks(
    small: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "symlink", refuse)
    found = locate(MODEL, download=True).path
    assert found is not None
    assert contents(found) == contents(small)
    assert not any(file.is_symlink() for file in found.iterdir())


def test_downloaded_part_of_a_file_is_not_requested_again(
    small: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_reader, "_PAUSE_S", 0.0)
    size = os.path.getsize(small / "model.safetensors")
    answered: list[str] = []

    def broken_off(request: Request) -> bool:
        if not request.path.endswith(".safetensors") or answered:
            return False
        answered.append(request.path)
        request.send_response(200)
        request.send_header("Content-Length", str(size))
        request.end_headers()
        request.wfile.write((small / "model.safetensors").read_bytes()[:1000])
        request.close_connection = True
        return True

    hub.fault = broken_off
    found = locate(MODEL, download=True).path
    assert found is not None
    assert contents(found) == contents(small)
    spans = [span for _, path, span in hub.requests if path.endswith(".safetensors")]
    assert spans == [f"bytes=0-{size - 1}", f"bytes=1000-{size - 1}"]


def test_repeatedly_interrupted_download_is_given_up(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_reader, "_PAUSE_S", 0.0)

    def one_byte(request: Request) -> bool:
        if request.path.endswith(".safetensors"):
            request.send_response(200)
            request.send_header("Content-Length", "2224")
            request.end_headers()
            request.wfile.write(b"x")
            request.close_connection = True
        return request.path.endswith(".safetensors")

    hub.fault = one_byte
    with pytest.raises(UserError, match="hf://org/name: the hub can't be reached: "):
        locate(MODEL, download=True)
    assert sum(path.endswith(".safetensors") for path in hub.paths()) == 3
    assert not any("safetensors" in name or "incomplete" in name for name in files(tmp_path / "cache"))


# -- contents that are not what the list of files says -------------------------------------------------------------------


def large_file(name: str, content: bytes) -> dict[str, object]:
    """A row of a list of files, as a hub gives it for a file in Git LFS."""
    return {
        "rfilename": name,
        "size": len(content),
        "blobId": "0" * 40,
        "lfs": {"sha256": hashlib.sha256(content).hexdigest()},
    }


def listing(small: Path, *rows: dict[str, object]) -> bytes:
    others = [{"rfilename": "config.json", "size": (small / "config.json").stat().st_size}]
    return json.dumps({"sha": COMMIT, "siblings": [*rows, *others]}).encode()


@pytest.mark.parametrize(
    "row", [large_file, lambda name, content: {"rfilename": name, "size": len(content), "blobId": "a" * 40}]
)
def test_download_with_another_digest_is_refused_and_not_stored(
    tmp_path: Path, small: Path, hub: Hub, row: Callable[[str, bytes], dict[str, object]]
) -> None:
    said = row("model.safetensors", bytes(os.path.getsize(small / "model.safetensors")))
    answer = listing(small, said)
    hub.fault = lambda request: bool(request.path.startswith("/api/") and (request.send(200, answer) or True))
    with pytest.raises(
        UserError, match=r"the hub says of model.safetensors can't be trusted: its content has another digest"
    ):
        locate(MODEL, download=True)
    assert not any(
        name in path for path in files(tmp_path / "cache") for name in ("safetensors", "blobs", "incomplete")
    )


def test_digests_of_large_files_and_of_git_are_those_of_sha256_and_of_git(
    small: Path, hub: Hub, tmp_path: Path
) -> None:
    content = (small / "model.safetensors").read_bytes()
    config = subprocess.run(["git", "hash-object", small / "config.json"], capture_output=True, text=True, check=True)
    siblings = [
        large_file("model.safetensors", content),
        {"rfilename": "config.json", "size": 23, "blobId": config.stdout.strip()},
    ]
    answer = json.dumps({"sha": COMMIT, "siblings": siblings}).encode()
    hub.fault = lambda request: bool(request.path.startswith("/api/") and (request.send(200, answer) or True))
    found = locate(MODEL, download=True).path
    assert found is not None
    assert contents(found) == contents(small)
    blobs = {path.name for path in (tmp_path / "cache/hub/models--org--name/blobs").iterdir()}
    assert blobs == {hashlib.sha256(content).hexdigest(), config.stdout.strip()}


@pytest.mark.parametrize("known", [True, False])
def test_resumed_download_is_not_a_mixture_of_two_contents(
    tmp_path: Path, small: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """The first answer breaks off, and the hub then sends another file of the same size. known: whether the list has a digest."""
    monkeypatch.setattr(hub_reader, "_PAUSE_S", 0.0)
    first = (small / "model.safetensors").read_bytes()
    second = first[:-1000] + bytes(1000)
    row = large_file("model.safetensors", first) if known else {"rfilename": "model.safetensors", "size": len(first)}
    answer = listing(small, row)
    begun: list[int] = []

    def changing(request: Request) -> bool:
        if request.path.startswith("/api/"):
            request.send(200, answer)
        elif request.path.endswith(".safetensors"):
            start = int(request.headers["Range"].partition("=")[2].partition("-")[0])
            begun.append(start)
            body = first if len(begun) == 1 else second[start:]
            request.send_response(206)
            request.send_header("Content-Range", f"bytes {start}-{len(first) - 1}/{len(first)}")
            request.send_header("Content-Length", str(len(body)))
            request.end_headers()
            request.wfile.write(body[:100] if len(begun) == 1 else body)
            request.close_connection = True
        return not request.path.endswith(".json")

    hub.fault = changing
    if known:
        with pytest.raises(UserError, match="its content has another digest"):
            locate(MODEL, download=True)
        assert begun == [0, 100]
        assert not any("safetensors" in path for path in files(tmp_path / "cache"))
    else:
        found = locate(MODEL, download=True).path
        assert found is not None
        assert (found / "model.safetensors").read_bytes() == second
        assert begun == [0, 0], "nothing tells whether the rest would be of the same content"


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_cached_file_of_another_hub_is_known_by_the_listed_digest(small: Path, hub: Hub, name: str) -> None:
    """A hub that lists no digests stores another content of the same size under the same id and commit."""
    (small / "tokenizer.json").write_text("{}")
    genuine = {file.name: file.read_bytes() for file in small.iterdir()}
    forged = genuine | {name: genuine[name][:-1] + b" "}
    sizes = [{"rfilename": each, "size": len(content)} for each, content in forged.items()]

    def other(request: Request) -> bool:
        listed = json.dumps({"sha": COMMIT, "siblings": sizes}).encode()
        request.send(200, listed if request.path.startswith("/api/") else forged[request.path.rpartition("/")[2]])
        return True

    hub.fault = other
    found = locate(MODEL, download=True).path
    assert found is not None
    assert contents(found) == forged
    hub.fault = lambda request: False
    assert HubAddress.parse(MODEL).listing().downloaded(found.parents[2]) is None
    assert locate(MODEL, download=True).path == found
    assert contents(found) == genuine


def test_content_without_a_link_is_read_once_for_its_digest(
    small: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = locate(MODEL, download=True).path
    assert found is not None
    listing = HubAddress.parse(MODEL).listing()
    for file in found.iterdir():  # as on a system without symbolic links
        os.replace(file.resolve(), file)
    assert listing.downloaded(found.parents[2]) == found
    monkeypatch.setattr(hub_cache, "content_hash", lambda digest, size: pytest.fail("it was read before"))
    assert listing.downloaded(found.parents[2]) == found
    assert contents(found) == contents(small)


def test_full_disk_during_a_download_is_reported_and_leaves_no_partial_file(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FullDisk(io.BytesIO):
        def write(self, content: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(hub_cache, "open", lambda path, mode: FullDisk(), raising=False)
    with pytest.raises(
        UserError, match="hf://org/name can't be saved: No space left on device; HF_HUB_CACHE names another folder"
    ):
        locate(MODEL, download=True)
    assert files(tmp_path / "cache") == set()


def test_unfinished_files_of_killed_downloads_are_removed_and_others_kept(
    tmp_path: Path, small: Path, hub: Hub
) -> None:
    folder = tmp_path / "cache/hub/models--org--name"
    (folder / "blobs").mkdir(parents=True)
    (folder / "snapshots").mkdir()
    with hub_cache.written(folder / "blobs" / "running") as running:
        killed = [running.with_name(f"killed.{running.name.partition('.')[2]}"), folder / "snapshots" / running.name]
        elsewhere = folder / "blobs" / "x.00000000.0123456789abcdef.incomplete"
        theirs = folder / "blobs" / "y.incomplete"
        for file in (running, *killed, elsewhere, theirs):
            file.write_bytes(b"some")
        found = locate(MODEL, download=True).path
        assert found is not None
        assert contents(found) == contents(small)
        assert {path.name for path in folder.rglob("*.incomplete")} == {running.name, elsewhere.name, theirs.name}


def test_file_named_like_a_folder_leaves_nothing_unfinished(tmp_path: Path, small: Path, hub: Hub) -> None:
    content = (small / "config.json").read_bytes()
    row = {"size": len(content), "blobId": blob_digest(small / "config.json")}
    siblings = [{"rfilename": name, **row} for name in ("a.json/b.json", "a.json")]
    answer = json.dumps({"sha": COMMIT, "siblings": siblings}).encode()

    def fault(request: Request) -> bool:
        request.send(200, answer if request.path.startswith("/api/") else content)
        return True

    hub.fault = fault
    with pytest.raises(UserError, match="list of files contradicts itself"):
        locate(MODEL, download=True)
    assert not list((tmp_path / "cache").rglob("*.incomplete"))


@pytest.mark.slow
def test_list_with_many_weights_is_searched_once(small: Path, hub: Hub) -> None:
    """A search of the list for each of its files would take minutes."""
    siblings = [{"rfilename": f"{number}.safetensors", "size": 1} for number in range(100_000)]
    answer = json.dumps({"sha": COMMIT, "siblings": siblings}).encode()
    hub.fault = lambda request: bool(request.path.startswith("/api/") and (request.send(200, answer) or True))
    with pytest.raises(UserError, match="it has 100,000 files to download, over the limit of 20,000"):
        locate("org/name", download=True)


# -- answers without an end ----------------------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Set limits of fractions of a second, and return an event that is set when the test ends."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    over = threading.Event()
    yield over
    over.set()


def bytes_forever(over: threading.Event, of: str, head: bytes, piece: bytes, pause: float) -> Fault:
    """Return a fault that answers requests for `of` with `head` and then endless pieces."""

    def fault(request: Request) -> bool:
        if of in request.path:
            request.close_connection = True
            with suppress(OSError):
                request.wfile.write(head)
                while not over.wait(pause):
                    request.wfile.write(piece)
        return of in request.path

    return fault


OK = b"HTTP/1.1 200 OK\r\n"
GZIPPED = OK + b"Content-Encoding: gzip\r\n\r\n" + gzip.compress(b"")[:10]
EMPTY_BLOCK = zlib.compressobj(wbits=-15).flush(zlib.Z_SYNC_FLUSH)[-5:]
"""A deflate block that decompresses to nothing."""
ENDLESS: dict[str, tuple[str, bytes, bytes, float, str]] = {
    "a list, byte after byte": ("/api/", OK + b"\r\n", b" ", 0.02, "the hub sends less than 1,000 bytes per second"),
    "a file, byte after byte": (".safetensors", OK + b"\r\n", b" ", 0.02, "the hub sends less than 1,000 bytes per second"),
    "headers of a list": ("/api/", OK, b"X-A: 1\r\n", 0.02, "the hub did not answer in time"),
    "headers of a file": (".safetensors", OK, b"X-A: 1\r\n", 0.02, "the hub did not answer in time"),
    "a header in one line": ("/api/", OK + b"X: ", b"x", 0.02, "the hub did not answer in time"),
    "compressed, and nothing comes of it": ("/api/", GZIPPED, EMPTY_BLOCK * 2000, 0.0, "its answer has over 1,000,000 bytes"),
    "compressed, and slow": ("/api/", GZIPPED, EMPTY_BLOCK, 0.02, "the hub sends less than 1,000 bytes per second"),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_hub_response_is_ended_with_an_error(
    tmp_path: Path, hub: Hub, impatient: threading.Event, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(addresses, "_LARGEST_LISTING", 1_000_000)
    of, head, piece, pause, words = ENDLESS[name]
    hub.fault = bytes_forever(impatient, of, head, piece, pause)
    with pytest.raises(UserError, match=words):
        locate(MODEL, download=True)
    assert not any("safetensors" in path for path in files(tmp_path / "cache"))


def test_total_time_for_headers_is_limited(
    hub: Hub, impatient: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "_MOST_SECONDS", 0.3)
    hub.fault = bytes_forever(impatient, "/api/", OK + b"\r\n", b" " * 1000, 0.02)
    with pytest.raises(UserError, match="the hub needs over 0 seconds for the headers, which is too long"):
        locate(MODEL)


@pytest.mark.parametrize("packed", [False, True])
def test_body_of_a_redirect_is_not_read(small: Path, hub: Hub, packed: bool) -> None:
    """The HTTP client would read it to its end, and decompress it."""
    sent, most = [0], 50_000_000
    piece = b"\0" * 100_000

    def fault(request: Request) -> bool:
        if not request.path.endswith(".safetensors"):
            return False
        request.send_response(302)
        request.send_header("Location", f"{request.path}?again")
        request.send_header("Content-Length", str(most))
        if packed:
            request.send_header("Content-Encoding", "gzip")
        request.end_headers()
        with suppress(OSError):
            while sent[0] < most:
                sent[0] += request.wfile.write(piece)
        request.close_connection = True
        return True

    hub.fault = fault
    found = locate(MODEL, download=True).path
    assert found is not None
    assert contents(found) == contents(small)
    assert sent[0] < most


@pytest.mark.slow
def test_thread_that_waits_for_headers_ends_after_the_error(hub: Hub, impatient: threading.Event) -> None:
    ended = threading.Event()

    def fault(request: Request) -> bool:
        request.close_connection = True
        try:
            while not impatient.wait(0.0):
                request.wfile.write(b"HTTP/1.1 103 Early Hints\r\nX: y\r\n\r\n" * 100)
        except OSError:
            ended.set()
        return True

    hub.fault = fault
    with pytest.raises(UserError, match="the hub did not answer in time"):
        locate(MODEL)
    assert ended.wait(10), "the connection is closed"


@pytest.mark.parametrize("text", ["..", "../x", "a/b/c", "a/../b", "a--b", "a/..b", ""])
def test_invalid_model_id_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="is no id of a model on a hub"):
        HubAddress.of_id(text)
