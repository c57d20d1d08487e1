"""A hub on this machine: a server of the interface that huggingface_hub asks, with the files of a folder."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest import mock
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" * 6 + "c0ff"
_PIECE = 1 << 20


@dataclass
class Hub:
    """A running server. Repositories are folders by their names."""

    repositories: dict[str, Path]
    delay_s: float = 0.0
    """How long the server waits before each answer."""
    fault: Callable[[Request], bool] = lambda request: False
    """Called with each request before it is answered; returns whether it has answered."""
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    """Method, path and Range of each request."""
    sent: int = 0
    """How many bytes of bodies were sent."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    address: str = ""

    def paths(self) -> list[str]:
        """The paths of all requests."""
        return [path for _, path, _ in self.requests]


class Request(BaseHTTPRequestHandler):
    """One request, answered from the folder of the repository."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        with self.hub.lock:
            self.hub.requests.append((self.command, self.path, self.headers.get("Range")))
        time.sleep(self.hub.delay_s)
        if self.hub.fault(self):
            return
        path = unquote(urlsplit(self.path).path)
        for name, folder in self.hub.repositories.items():
            if path.startswith(f"/api/models/{name}/"):
                return self.answer_json(folder, path)
            if path.startswith(f"/{name}/resolve/"):
                return self.answer_file(folder / path.split("/", 5)[5])
        self.refuse(404, "RepoNotFound")

    do_HEAD = do_GET

    def answer_json(self, folder: Path, path: str) -> None:
        files = [
            (str(each.relative_to(folder)), each.stat().st_size, digest(each))
            for each in sorted(folder.rglob("*"))
            if each.is_file()
        ]
        if "/tree/" in path:
            said: object = [{"type": "file", "oid": etag, "size": size, "path": name} for name, size, etag in files]
        else:
            siblings = [{"rfilename": name, "size": size, "blobId": etag} for name, size, etag in files]
            said = {"id": "org/name", "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
        self.send(200, json.dumps(said).encode(), {"Content-Type": "application/json"})

    def answer_file(self, path: Path) -> None:
        if not path.is_file():
            return self.refuse(404, "EntryNotFound")
        size = path.stat().st_size
        start, end = 0, size
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if wanted:
            start, end = int(wanted[1]), min(int(wanted[2] or size), size - 1) + 1
        headers = {"ETag": f'"{digest(path)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if wanted:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        self.send_response(206 if wanted else 200)
        for name, value in (headers | {"Content-Length": str(end - start)}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        with open(path, "rb") as file:
            file.seek(start)
            while start < end and (piece := file.read(min(_PIECE, end - start))):
                self.wfile.write(piece)
                start += len(piece)
                with self.hub.lock:
                    self.hub.sent += len(piece)

    def send(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        """Send a whole answer."""
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
            with self.hub.lock:
                self.hub.sent += len(body)

    def refuse(self, status: int, code: str) -> None:
        """Answer as a hub does that refuses a request."""
        self.send(status, b"{}", {"X-Error-Code": code})

    def log_message(self, *arguments: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: a client that waits no longer closes its connection."""


def digest(path: Path) -> str | None:
    """The SHA-1 that git gives a file, as `git hash-object` does. None for a file of over 64 MiB, which would take long."""
    size = path.stat().st_size
    return None if size > 64 << 20 else hashlib.sha1(b"blob %d\0" % size + path.read_bytes()).hexdigest()


@contextmanager
def hub_of(cache: Path, **repositories: Path) -> Iterator[Hub]:
    """Run a hub, and let huggingface_hub ask it while the block runs. cache: where headers and downloads go. repositories: folders
    by names in which `__` stands for the slash.
    """
    from huggingface_hub import constants

    hub = Hub({name.replace("__", "/"): folder for name, folder in repositories.items()})
    server = _Server(("127.0.0.1", 0), type("Handler", (Request,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    places = {
        "XDG_CACHE_HOME": str(cache),
        "HF_HUB_CACHE": str(cache / "hub"),
        "HF_ENDPOINT": hub.address,
        "HF_HUB_DISABLE_XET": "1",
    }
    try:
        with (
            mock.patch.dict("os.environ", places),
            mock.patch.object(constants, "ENDPOINT", hub.address),
            mock.patch.object(
                constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.address + "/{repo_id}/resolve/{revision}/{filename}"
            ),
            mock.patch.object(constants, "HF_HUB_CACHE", str(cache / "hub")),
            mock.patch.object(constants, "HF_HUB_OFFLINE", False),
        ):
            yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
