"""The kind of `fuzz.py` that is what a hub answers: its list of files, the files, and the headers of its answers are changed. Each
model is inspected by its headers or downloaded.

A case is JSON: what the list says, the files (base64), the changes of answers, and which command is run.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

from tests.helpers.hub_server import COMMIT, Request, hub_of
from tests.helpers.mutations import STRANGE, changed

KINDS = ("hub",)
_NAMES = (
    "../x.safetensors", "/etc/x.safetensors", "a\x1b[2J.json", "x\u202e.json", "a\\b.json", "a/b/c.safetensors", "con:x.json", "",
    ".", "model.safetensors/x.json", "x" * 300 + ".json", "a/" * 600 + "b.json", "pytorch_model.bin", "m-00001-of-00002.gguf",
    "model-00001-of-00002.safetensors", "model.safetensors.index.json", "model.fp16.safetensors", "model_index.json", "x.gguf",
)  # fmt: skip
_SIZES: tuple[Any, ...] = (
    0,
    1,
    7,
    8,
    9,
    4096,
    98304,
    2**31,
    2**40,
    2**62,
    2**63 - 1,
    2**63,
    2**64,
    10**400,
    -1,
    1.5,
    "9",
    None,
    True,
    [],
    {},
)
_SAID = {
    "Content-Length": ("0", "1", "-1", "x", "99999999999999999999", "7, 7"),
    "Content-Range": ("bytes 0-1/2", "bytes 5-9/10", "x", "bytes */9", f"bytes {'9' * 5000}-1/2", "bytes 0-0/-1"),
    "Content-Encoding": ("gzip", "deflate", "br", "gzip, gzip", "identity", "x" * 3000),
    "Transfer-Encoding": ("chunked", "gzip", "identity", "chunked, chunked"),
    "Location": (
        "/x",
        "file:///etc/passwd",
        "http://[",
        "//",
        "http://a b",
        "\x7f",
        "?",
        "http://127.0.0.1:1/",
        "x" * 9000,
        "",
    ),
    "ETag": ('"../../x"', "x" * 9000, '"\xff"'),
    "X-Repo-Commit": ("../x", ""),
    "X-Error-Code": ("RepoNotFound", "GatedRepo", "x" * 9000, "\xff"),
    "X-Error-Message": ("a\x1b[2J", "\xff" * 100),
    "Set-Cookie": ("a=b; expires=" + " 1" * 3000, "=" * 5000, "a=b; Domain=.com; Max-Age=9e999"),
    "Connection": ("close", "upgrade"),
    "X": ("y" * 200_000, " ", "\t"),
}
_COMMANDS = (
    ["inspect", "hf://org/name"],
    ["inspect", "hf://org/name", "--download"],
    ["inspect", "org/name", "--download"],
)
_STATUSES = (200, 200, 206, 206, 100, 103, 204, 301, 302, 304, 307, 308, 401, 403, 404, 416, 429, 500, 503, 599, 999)


def make_good(kind: str, folder: Path) -> list[bytes]:
    """Repositories with a checkpoint in one file, in two, with the shapes of quantized weights, and with a GGUF file."""
    import torch
    from safetensors.torch import save_file
    from tests.helpers.quantized import CASES

    made = []
    for name in ("one", "two", "quantized", "gguf"):
        place = folder / f"hub-{name}"
        place.mkdir()
        (place / "config.json").write_text('{"model_type": "llama", "hidden_size": 8}')
        if name == "quantized":
            CASES["ct int4 in groups"]().save(place)
        elif name == "gguf":
            _write_gguf(place / "x.gguf")
        else:
            parts = (
                ["model.safetensors"]
                if name == "one"
                else ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
            )
            weights = {f"layers.{number}.weight": part for number, part in enumerate(parts)}
            for weight, part in weights.items():
                save_file({weight: torch.randn(4, 8)}, place / part)
            if name == "two":
                (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
        files = {str(file.relative_to(place)): file.read_bytes() for file in place.rglob("*") if file.is_file()}
        made += [_case(files, command) for command in _COMMANDS]
    return made


def _write_gguf(path: Path) -> None:
    import numpy as np
    from tests.helpers.gguf_files import gguf_file

    with gguf_file(path, "llama") as writer:
        writer.add_uint32("llama.block_count", 1)
        writer.add_tensor("blk.0.weight", np.arange(64, dtype=np.float32).reshape(2, 32))


def _case(files: dict[str, bytes], command: list[str]) -> bytes:
    siblings = [
        {"rfilename": name, "size": len(content), "blobId": _blob(content)}
        | (
            {"lfs": {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}}
            if "config" not in name
            else {}
        )
        for name, content in files.items()
    ]
    case = {
        "list": {"id": "org/name", "sha": COMMIT, "siblings": siblings, "tags": []},
        "files": {name: base64.b64encode(content).decode() for name, content in files.items()},
        "changes": [],
        "command": command,
    }
    return json.dumps(case).encode()


def _blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def mutated(kind: str, content: bytes, chooser: random.Random) -> bytes | None:
    """A repository with another list, another file, or other answers."""
    case = json.loads(content)
    for _ in range(chooser.choice((1, 1, 2, 3))):
        what = chooser.random()
        if what < 0.3:
            _change_list(case, chooser)
        elif what < 0.5:
            _change_file(case, chooser)
        else:
            of = chooser.choice(("/api/", *case["files"], "/resolve/"))
            case["changes"].append([of, _change_of_answer(chooser), chooser.choice((1, 2, 99))])
    return json.dumps(case).encode("utf-8", "surrogatepass")


def _change_list(case: dict[str, Any], chooser: random.Random) -> None:
    siblings = case["list"].get("siblings") if isinstance(case["list"], dict) else None
    files = [each for each in siblings if isinstance(each, dict)] if isinstance(siblings, list) else []
    if not files or chooser.random() < 0.3:
        case["list"] = changed(case["list"], chooser)
        return
    file = chooser.choice(files)
    what = chooser.randrange(4)
    if what == 0:
        file["size"] = chooser.choice(_SIZES)
    elif what == 1:
        files.append({**file, "rfilename": chooser.choice((*_NAMES, *map(str, STRANGE)))})
        case["list"]["siblings"] = files
    elif what == 2:
        file["rfilename"] = chooser.choice((*_NAMES, *map(str, STRANGE)))
    else:
        wrong = chooser.choice(("0" * 40, "0" * 64, "../x", "", "A" * 64, 5, None, "0" * 5000))
        file[chooser.choice(("blobId", "lfs"))] = chooser.choice((wrong, {"sha256": wrong}))


def _change_file(case: dict[str, Any], chooser: random.Random) -> None:
    """Change a file's bytes, mostly in its header. Half of the lists know the new content."""
    name = chooser.choice(list(case["files"]))
    data = bytearray(base64.b64decode(case["files"][name]))
    place = chooser.randrange(min(len(data), 200)) if data else 0
    what = chooser.randrange(5)
    if what == 0:
        data[place : place + 8] = chooser.choice((0, 1, 2**31, 2**63, 2**64 - 1, len(data))).to_bytes(8, "little")
    elif what == 1:
        del data[place:]
    elif what == 2:
        data[place:place] = chooser.choice((b"\0", b"\xff" * 100, b"{", b"[" * 3000, b"9" * 400))
    elif what == 3 and name.endswith(".json"):
        with contextlib.suppress(ValueError, RecursionError):
            data = bytearray(json.dumps(changed(json.loads(bytes(data)), chooser)).encode("utf-8", "surrogatepass"))
    elif data:
        data[place] ^= 1 << chooser.randrange(8)
    case["files"][name] = base64.b64encode(bytes(data)).decode()
    if chooser.random() < 0.5 and isinstance(case["list"], dict) and isinstance(case["list"].get("siblings"), list):
        for each in case["list"]["siblings"]:
            if isinstance(each, dict) and each.get("rfilename") == name:
                each |= {"size": len(data), "blobId": _blob(bytes(data)), "lfs": None}


def _change_of_answer(chooser: random.Random) -> dict[str, Any]:
    """What is done to an answer: another status, other headers, other bytes of it, or its end."""
    made: dict[str, Any] = {}
    for _ in range(chooser.choice((1, 1, 2))):
        what = chooser.randrange(6)
        if what == 0:
            made["status"] = chooser.choice(_STATUSES)
        elif what <= 2:
            name = chooser.choice(list(_SAID))
            made.setdefault("headers", {})[name] = chooser.choice(_SAID[name])
            if name == "Location":
                made["status"] = 302
        elif what == 3:
            made["cut"] = chooser.random()
        elif what == 4:
            made["body"] = chooser.choice(("gzip", "doubled", "other", "none", "bomb"))
        else:
            byte = chooser.choice(
                (b"\0", b"\r\n", b"\n\n", b"\xff", b": ", b"HTTP/0.9 ", b"HTTP/1.1 103 x\r\n\r\n" * 50, b"z" * 120_000)
            )
            made["bytes"] = [chooser.random(), base64.b64encode(byte).decode()]
    return made


def run_case(content: bytes, folder: Path, seed: int) -> int:
    """The exit status of the command. Raises whatever comes out of the program, and AssertionError if it wrote a file outside its
    caches.
    """
    from huggingface_hub import constants

    from dtype_engine.checkpoint import hub_reader
    from dtype_engine.cli import cli
    from dtype_engine.cli.program import run

    case = json.loads(content)
    place = folder / "hub"
    shutil.rmtree(place, ignore_errors=True)
    (place / "empty").mkdir(parents=True)
    hub_reader._PAUSE_S, constants.HF_HUB_DOWNLOAD_TIMEOUT = 0.0, 0.3
    with hub_of(place / "cache", org__name=place / "empty") as hub:
        hub.fault = lambda request: _answered(request, case)
        status = run(cli, "dtype-engine", [*case["command"], "--depth", "0"])
    _check_left(place)
    return status


def _check_left(place: Path) -> None:
    """Raise AssertionError for unfinished files, for files outside the caches, and for contents other than their names say."""
    for file in place.rglob("*"):
        name = str(file.relative_to(place))
        assert not name.endswith(".incomplete"), f"{name} was left"
        assert file.is_dir() or name.startswith(("cache/dtype-tui/headers/", "cache/hub/models--org--name/")), (
            f"{name} was written"
        )
        assert name.isprintable(), f"{name!a} was written"
        if file.parent.name == "blobs":
            content = file.read_bytes()
            assert file.name in (_blob(content), hashlib.sha256(content).hexdigest()), f"{name} has another content"


def _answered(request: Request, case: dict[str, Any]) -> bool:
    """Send the answer of a case to a request."""
    name = request.path.partition(f"/resolve/{COMMIT}/")[2]
    headers = {"ETag": '"x"', "X-Repo-Commit": COMMIT}
    if request.path.startswith("/api/"):
        status, body = 200, json.dumps(case["list"]).encode("utf-8", "surrogatepass")
    elif name in case["files"]:
        whole = base64.b64decode(case["files"][name])
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range") or "")
        start, end = (int(found[1]), int(found[2]) + 1) if found else (0, len(whole))
        status, body = 206, whole[start:end]
        headers["Content-Range"] = f"bytes {start}-{start + len(body) - 1}/{len(whole)}"
    else:
        status, body = 404, b"{}"
    headers["Content-Length"] = str(len(body))
    change: dict[str, Any] = {}
    for each in case["changes"]:
        if each[0] in request.path and each[2] > 0:
            each[2] -= 1
            change |= each[1]
    with contextlib.suppress(OSError):
        request.wfile.write(_as_sent(change, change.get("status", status), headers, body))
    request.close_connection = bool(change)
    return True


def _as_sent(change: dict[str, Any], status: int, headers: dict[str, str], body: bytes) -> bytes:
    match change.get("body"):
        case "gzip" | "bomb":
            body = gzip.compress(body if change["body"] == "gzip" else b"\0" * 30_000_000)
            headers |= {"Content-Encoding": "gzip", "Content-Length": str(len(body))}
        case "doubled":
            body += body
        case "other":
            body = bytes(len(body))
        case "none":
            body = b""
    headers |= change.get("headers", {})
    head = f"HTTP/1.1 {status} x\r\n" + "".join(f"{name}: {value}\r\n" for name, value in headers.items()) + "\r\n"
    sent = head.encode("latin-1", "replace") + body
    if "bytes" in change:
        share, piece = change["bytes"]
        place = int(share * min(len(sent), 400))
        sent = sent[:place] + base64.b64decode(piece) + sent[place:]
    return sent[: int(change["cut"] * len(sent))] if "cut" in change else sent
