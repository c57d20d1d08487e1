"""`dtype-tui serve`: the app as a browser gets it, over HTTP and the web socket that textual-serve's page opens."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import aiohttp
import psutil
import pytest

from terminal import PROGRAM


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


async def what_a_browser_sees(port: int, words: str, keys: str) -> tuple[str, str]:
    """The page, and what the app draws until `words` match it after `keys` were typed."""
    async with aiohttp.ClientSession() as session:
        address = f"http://127.0.0.1:{port}"
        async with session.get(address) as response:
            assert response.status == 200
            page = await response.text()
        async with session.ws_connect(f"{address}/ws?width=120&height=36") as browser:
            drawn = ""
            typed = False
            until = time.monotonic() + 30
            while not re.search(words, drawn) and time.monotonic() < until:
                message = await browser.receive(timeout=20)
                if message.type in (aiohttp.WSMsgType.BINARY, aiohttp.WSMsgType.TEXT):
                    data = message.data if isinstance(message.data, bytes) else message.data.encode()
                    drawn += data.decode("utf-8", "replace")
                if "embed_tokens" in drawn and not typed:
                    typed = True
                    await browser.send_str(json.dumps(["stdin", keys]))
            return page, drawn


def test_a_browser_gets_the_app_and_its_keys_work() -> None:
    port = free_port()
    server = subprocess.Popen(
        [PROGRAM, "serve", "--port", str(port), "demo"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with socket.socket() as tried:
                if tried.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        page, drawn = asyncio.run(what_a_browser_sees(port, r"takes.{0,60}18.{0,60}tensors", ":cast *.mlp bf16"))
        assert "<html" in page.lower()
        assert re.search(r"takes.{0,60}18.{0,60}tensors", drawn)
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()


async def open_and_kill_the_server(port: int, server: subprocess.Popen[str]) -> list[psutil.Process]:
    """Wait until a browser has the app; the processes that the server had, once it was killed without a word."""
    address = f"http://127.0.0.1:{port}/ws?width=120&height=36"
    async with aiohttp.ClientSession() as session, session.ws_connect(address) as browser:
        drawn = b""
        while b"embed_tokens" not in drawn:
            drawn += bytes((await browser.receive(timeout=30)).data)
        started = psutil.Process(server.pid).children(recursive=True)
        server.kill()
        return started


def test_the_app_does_not_outlive_its_server() -> None:
    port = free_port()
    server = subprocess.Popen([PROGRAM, "serve", "--port", str(port), "demo"], stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    assert f":{port} " in server.stderr.readline()
    until = time.monotonic() + 20
    while socket.socket().connect_ex(("127.0.0.1", port)) != 0:
        assert time.monotonic() < until
        time.sleep(0.1)
    started = asyncio.run(open_and_kill_the_server(port, server))
    assert started
    _, alive = psutil.wait_procs(started, timeout=20)
    assert alive == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["no-such-model"], "no such folder or file"),
        (["--port", "0"], "0 is not in the range"),
        (["demo", "--bogus"], "No such option"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_served(arguments: list[str], says: str) -> None:
    done = subprocess.run([PROGRAM, "serve", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_port_that_is_taken_is_said() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = subprocess.run([PROGRAM, "serve", "--port", port], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"can't listen on 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr


def test_it_is_this_machine_only_unless_asked() -> None:
    from dtype_tui.serve import serve

    host = next(option for option in serve.params if option.name == "host")
    assert host.default == "127.0.0.1"


def test_without_the_package_it_says_what_to_install() -> None:
    blocked = (
        "import sys; sys.modules['textual_serve'] = None; sys.argv = ['dtype-tui', 'serve', 'demo']; "
        "import dtype_tui.cli as c; c.main()"
    )
    done = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True, timeout=60, env=os.environ)
    assert done.returncode == 2
    assert "pip install 'dtype-tui[serve]'" in done.stderr
