"""`dtype-tui serve`: the app as a browser gets it, over HTTP and the web socket that textual-serve's page opens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import psutil
import pytest
from tests.helpers import preloaded
from tests.helpers.paths import DEMO
from tests.helpers.recorded_worker import wait_until
from tests.helpers.terminal import PROGRAM


def forked() -> tuple[str, str]:
    """Return options with which the app's engine is forked from a process that has imported torch."""
    return ("--engine-command", shlex.join(preloaded.command(preloaded.ENGINE)))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@contextmanager
def served(
    *arguments: str, cwd: Path | None = None, descriptors: int | None = None, **environment: str
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Start a server. Yields the address that it printed, and its process. descriptors: how many files it may have open; None: as
    many as this process.
    """
    port = free_port()
    limit = [] if descriptors is None else ["/bin/sh", "-c", f'ulimit -Sn {descriptors}; exec "$@"', "sh"]
    server = subprocess.Popen(
        [*limit, PROGRAM, "serve", "--port", str(port), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=os.environ | environment,
    )
    try:
        assert server.stderr is not None
        found = re.search(rf"http://\S+:{port}/\S+", server.stderr.readline())
        assert found is not None
        wait_until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0, 20)
        yield found[0], server
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()


def socket_of(page: str) -> str:
    """Return the address of the web socket that the script of a page would open."""
    found = re.search(r'data-session-websocket-url="([^"]*)"', page)
    assert found is not None
    return f"{found[1]}?width=120&height=36"


async def what_a_browser_sees(address: str, words: str, keys: str) -> tuple[str, str]:
    """Open the address and type `keys`. Returns the page, and what the app drew until that matched `words`."""
    async with aiohttp.ClientSession() as session:
        async with session.get(address) as response:
            assert response.status == 200
            page = await response.text()
        async with session.ws_connect(socket_of(page), origin=address.rpartition("/")[0].rpartition("/")[0]) as browser:
            drawn = ""
            typed = False
            until = time.monotonic() + 60
            while not re.search(words, drawn) and time.monotonic() < until:
                message = await browser.receive(timeout=30)
                if message.type in (aiohttp.WSMsgType.BINARY, aiohttp.WSMsgType.TEXT):
                    data = message.data if isinstance(message.data, bytes) else message.data.encode()
                    drawn += data.decode("utf-8", "replace")
                if "embed_tokens" in drawn and not typed:
                    typed = True
                    await browser.send_str(json.dumps(["stdin", keys]))
            return page, drawn


def test_served_app_is_shown_in_a_browser_and_receives_keys() -> None:
    with served("demo", *forked()) as (address, _):
        page, drawn = asyncio.run(what_a_browser_sees(address, r"matches.{0,60}18.{0,60}tensors", ":cast *.mlp bf16"))
    assert "<html" in page.lower()
    assert re.search(r"matches.{0,60}18.{0,60}tensors", drawn)


async def statuses(address: str) -> dict[str, int]:
    """Return the HTTP status of requests of which most must be refused. The keys say what is special about each request."""
    base, token = re.fullmatch(r"(http://[^/]+)/([^/]+)/", address).groups()  # type: ignore[union-attr]
    port = base.rpartition(":")[2]
    requests: dict[str, tuple[str, dict[str, str]]] = {
        "no token": (f"{base}/", {}),
        "another token": (f"{base}/{token[:-1]}{'a' if token[-1] != 'a' else 'b'}/", {}),
        "token as a question": (f"{base}/?token={token}", {}),
        "file without token": (f"{base}/static/js/textual.js", {}),
        "another host": (address, {"Host": f"evil.example:{port}"}),
        "another host that begins well": (address, {"Host": f"localhost.evil.example:{port}"}),
        "another page": (address, {"Origin": "http://evil.example"}),
        "no page": (address, {"Origin": "null"}),
        "another port's page": (address, {"Origin": "http://127.0.0.1:1"}),
        "rebound": (address, {"Host": f"evil.example:{port}", "Origin": f"http://evil.example:{port}"}),
        "page": (address, {}),
        "page by name": (address, {"Host": f"localhost:{port}"}),
        "page through a tunnel": (address, {"Host": "localhost:9000", "Origin": "http://localhost:9000"}),
        "file": (f"{address}static/js/textual.js", {}),
    }
    found: dict[str, int] = {}
    async with aiohttp.ClientSession() as session:
        for what, (url, headers) in requests.items():
            async with session.get(url, headers=headers) as response:
                found[what] = response.status
                if what == "page through a tunnel":
                    assert socket_of(await response.text()).startswith(f"ws://localhost:9000/{token}/ws")
        for what, (url, headers) in requests.items():
            if "file" in what:
                continue
            try:
                async with session.ws_connect(f"{url.rstrip('/')}/ws?width=80&height=24", headers=headers) as browser:
                    found[f"socket: {what}"] = 101
                    await browser.close()
            except aiohttp.WSServerHandshakeError as error:
                found[f"socket: {what}"] = error.status
    return found


def test_served_app_is_refused_without_the_token() -> None:
    """Refused are other users of this machine, who have no token, and pages of the internet in a browser on this machine."""
    with served("demo") as (address, _):
        found = asyncio.run(statuses(address))
    good = {"page", "page by name", "page through a tunnel", "file"}
    assert {what: status for what, status in found.items() if what in good} == dict.fromkeys(good, 200)
    sockets = {f"socket: {what}" for what in good - {"file"}}
    assert {what: status for what, status in found.items() if what in sockets} == dict.fromkeys(sockets, 101)
    others = {what: status for what, status in found.items() if what not in good | sockets}
    assert len(others) == 19
    assert others == dict.fromkeys(others, 403)


def test_every_served_app_has_its_own_long_token() -> None:
    from dtype_tui.cli.guarded_server import GuardedServer

    tokens = {GuardedServer("true", "127.0.0.1", 1, "").token for _ in range(100)}
    assert len(tokens) == 100
    assert all(len(token) >= 32 for token in tokens)


async def among_strangers(count: int) -> tuple[list[int], list[bytes], str]:
    """Open `count` idle connections to a server that allows 8. Returns the status of requests without and with the token, what the
    idle connections received, and the token.
    """
    from dtype_tui.cli.guarded_server import GuardedServer

    server = GuardedServer("true", "127.0.0.1", free_port(), "")
    server.most_strangers, server.stranger_seconds = 8, 0.5
    statuses = []
    async with server.listening(), aiohttp.ClientSession() as session:
        idle = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(count)]
        for path in ("", f"{server.token}/", "missing", f"{server.token}/missing"):
            async with session.get(f"http://127.0.0.1:{server.port}/{path}") as response:
                statuses.append(response.status)
        assert len(server._strangers) <= 8
        received = []
        for reader, writer in idle:
            with contextlib.suppress(ConnectionResetError):
                received.append(await asyncio.wait_for(reader.read(), 10))
            writer.close()
        async with session.get(server.address) as response:
            statuses.append(response.status)
    return statuses, received, server.token


def test_connections_to_the_served_app_without_the_token_are_limited(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Otherwise anybody on the machine could use up the file descriptors that the server needs for its user. No printed line has
    the token.
    """
    with caplog.at_level("DEBUG"):
        statuses, received, token = asyncio.run(among_strangers(60))
    assert statuses == [403, 200, 403, 404, 200]
    assert set(received) <= {b""}
    printed = capfd.readouterr()
    assert token not in printed.out + printed.err + "".join(map(str, caplog.messages))


ECHO = """
import sys
print("__GANGLION__", flush=True)
while head := sys.stdin.buffer.read(5):
    payload = sys.stdin.buffer.read(int.from_bytes(head[1:], "big"))
    sys.stdout.buffer.write(b"D" + head[1:] + payload)
    sys.stdout.buffer.flush()
    if b'"quit"' in payload:
        break
"""
"""In place of the app: it sends back what it gets."""
SENT = [
    "null", "[]", "{", "[" * 100_000, '["stdin"]', '["stdin", 5]', '["resize", 7]', '["resize", {"width": "x", "height": 1}]',
    '["resize", {"width": 1}]', '["deliver_file_start", "x"]', '[["stdin"], "x"]', '{"stdin": "x"}',
]  # fmt: skip
"""Messages that the page of textual-serve never sends."""


async def talk_to_an_echo() -> tuple[list[object], list[int]]:
    """Send nonsense, sizes and keys to a server. Returns what its app received, and the statuses of connections with bad sizes and
    of one connection too many.
    """
    from dtype_tui.cli.guarded_server import GuardedServer

    server = GuardedServer(shlex.join([sys.executable, "-c", ECHO]), "127.0.0.1", free_port(), "")
    server.most_apps = 1
    echoed: list[object] = []
    statuses = []

    async def status(width: object, height: object) -> int:
        try:
            async with session.ws_connect(f"{server.address}ws?width={width}&height={height}"):
                return 101
        except aiohttp.WSServerHandshakeError as error:
            return error.status

    async with server.listening(), aiohttp.ClientSession() as session:
        async with session.ws_connect(f"{server.address}ws?width=80&height=24") as page:
            for text in SENT:
                await page.send_str(text)
            for width, height in ((80, 24), (20_000, 20_000), (-5, 0), (10**30, 1)):
                await page.send_str(json.dumps(["resize", {"width": width, "height": height}]))
            await page.send_str('["stdin", "a\\ud800"]')
            echoed += [(await page.receive(timeout=20)).data for _ in range(5)]
            await page.send_str('["ping", "1"]')
            echoed.append((await page.receive(timeout=20)).json())
            statuses.append(await status(80, 24))
        while server._apps:
            await asyncio.sleep(0.01)
        sizes = ((100_000, 24), (80, 100_000), (0, 24), (80, -1), ("x", "y"), (1000, 500))
        statuses += [await status(*size) for size in sizes]
        while server._apps:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # in which the end of the last process is noticed
    return echoed, statuses


def test_page_of_the_served_app_can_send_only_keys_and_screen_sizes_within_limits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A screen of a billion cells would take all memory, in an app that lives on after its page is closed."""
    echoed, statuses = asyncio.run(talk_to_an_echo())
    sizes = [json.loads(data) for data in echoed[:4]]  # type: ignore[arg-type]
    assert [(size["width"], size["height"]) for size in sizes] == [(80, 24), (1000, 500), (1, 1), (1000, 1)]
    assert echoed[4:] == [b"a?", ["pong", "1"]]
    assert statuses == [503, 400, 400, 400, 400, 400, 101]
    assert caplog.text == ""


@pytest.mark.skipif(sys.platform != "linux", reason="what a process has open is counted on Linux")
def test_idle_connections_do_not_block_the_served_app() -> None:
    """200 idle connections, three times as many as the server may have open, are held open while the user connects."""
    with contextlib.ExitStack() as held, served("demo", *forked(), descriptors=64) as (address, server):
        port = int(re.findall(r":(\d+)/", address)[0])
        for _ in range(200):
            idle = held.enter_context(socket.socket())
            idle.setblocking(False)
            idle.connect_ex(("127.0.0.1", port))
        time.sleep(0.5)
        assert len(list(Path(f"/proc/{server.pid}/fd").iterdir())) < 64
        _, drawn = asyncio.run(what_a_browser_sees(address, "embed_tokens", ""))
        assert "embed_tokens" in drawn
        server.send_signal(signal.SIGINT)
        printed = "".join(server.communicate(timeout=20))
    token = address.rstrip("/").rpartition("/")[2]
    assert token not in printed, "only the first line has the address"


def test_viewer_of_a_read_only_served_app_cannot_write_files(tmp_path: Path) -> None:
    """Nothing is written: no session, no scan, and no trace of the visit."""
    state = tmp_path / "state"
    with served("--read-only", "demo", cwd=tmp_path, XDG_STATE_HOME=str(state)) as (address, _):
        _, drawn = asyncio.run(what_a_browser_sees(address, r"read-only: no files", "2e"))
        assert re.search("read-only: no files", drawn)
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize(
    ("host", "asked", "meant"),
    [("127.0.0.1", "[::1]:8000", True), ("127.0.0.1", "10.0.0.7:8000", False), ("127.0.0.1", "", False),
     ("127.0.0.1", "[::1", False), ("0.0.0.0", "10.0.0.7:8000", True), ("0.0.0.0", "evil.example", False),
     ("box.example", "box.example:8000", True), ("box.example", "BOX.example", True)],
)  # fmt: skip
def test_requests_to_the_served_app_for_other_host_names_are_refused(host: str, asked: str, meant: bool) -> None:
    from dtype_tui.cli.guarded_server import GuardedServer

    assert GuardedServer("true", host, 8000, "")._is_meant(asked) is meant


def test_python_files_in_the_served_folder_do_not_run(tmp_path: Path) -> None:
    """A downloaded model may contain files with the names of modules that Python imports."""
    for file in DEMO.iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path)
    mark = tmp_path / "ran"
    for name in ("click", "torch", "textual", "dtype_tui", "runpy", "numpy"):
        (tmp_path / f"{name}.py").write_text(f"open({str(mark)!r}, 'a').write({name!r})\nraise SystemExit(3)\n")
    with served(".", cwd=tmp_path) as (address, _):
        _, drawn = asyncio.run(what_a_browser_sees(address, "SQNR", ""))
    assert not mark.exists()
    assert "embed_tokens" in drawn


async def open_and_kill_the_server(address: str, server: subprocess.Popen[str]) -> list[psutil.Process]:
    """Wait until a browser shows the app, then kill the server with SIGKILL. Returns the server's child processes."""
    async with aiohttp.ClientSession() as session, session.ws_connect(f"{address}ws?width=120&height=36") as browser:
        drawn = b""
        while b"embed_tokens" not in drawn:
            drawn += bytes((await browser.receive(timeout=30)).data)
        started = psutil.Process(server.pid).children(recursive=True)
        server.kill()
        return started


def test_served_app_ends_with_its_server() -> None:
    with served("demo") as (address, server):
        started = asyncio.run(open_and_kill_the_server(address, server))
        assert started
        _, alive = psutil.wait_procs(started, timeout=20)
        assert alive == []


def packet(kind: bytes, payload: bytes) -> bytes:
    """What textual-serve writes to the app: a key (`D`), or a message in JSON (`M`)."""
    return kind + len(payload).to_bytes(4, "big") + payload


@pytest.mark.parametrize(
    "last", [packet(b"D", b"j"), packet(b"M", b'{"type": "quit"}'), b""], ids=["key", "quit", "none"]
)
def test_app_whose_browser_was_closed_ends_without_an_error(tmp_path: Path, last: bytes) -> None:
    """The server has closed the pipe into which the app still draws."""
    driver = {"TEXTUAL_DRIVER": "textual.drivers.web_driver:WebDriver", "COLUMNS": "120", "ROWS": "36"}
    served_app = subprocess.Popen(
        [PROGRAM, "--read-only", "demo", *forked()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | driver | {"XDG_STATE_HOME": str(tmp_path / "state")},
    )
    assert served_app.stdin is not None
    assert served_app.stdout is not None
    assert served_app.stderr is not None
    drawn = b""
    while b"embed_tokens" not in drawn:
        drawn += os.read(served_app.stdout.fileno(), 2**16)
    served_app.stdout.close()
    served_app.stdin.write(last)
    served_app.stdin.close()
    printed = served_app.stderr.read()
    assert served_app.wait(60) == 0
    assert printed == b""
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["no-such-model"], "no such folder or file"),
        (["--port", "0"], "0 is not in the range"),
        (["demo", "--bogus"], "No such option"),
    ],
)
def test_invalid_arguments_of_serve_are_refused_in_one_line(arguments: list[str], says: str) -> None:
    done = subprocess.run([PROGRAM, "serve", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_port_in_use_is_reported_by_serve() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = subprocess.run([PROGRAM, "serve", "--port", port], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"can't listen on 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr


def test_serve_listens_only_on_localhost_by_default() -> None:
    from dtype_tui.cli.serve import serve

    host = next(option for option in serve.params if option.name == "host")
    assert host.default == "127.0.0.1"


def test_serve_without_textual_serve_says_what_to_install() -> None:
    blocked = (
        "import sys; sys.modules['textual_serve'] = None; sys.argv = ['dtype-tui', 'serve', 'demo']; "
        "from dtype_tui.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True, timeout=60, env=os.environ)
    assert done.returncode == 2
    assert "pip install 'dtype-tui[serve]'" in done.stderr
