"""`dtype-tui serve` in a real browser: headless Chromium, driven over its debugging protocol. Skipped where there is none."""

from __future__ import annotations

import asyncio
import base64
import io
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import pyte
import pytest
from PIL import Image
from tests.helpers.terminal import QUICK, clean
from tests.terminal.test_serve import forked, served

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SIZE = (1200, 800)
# As root, without a display, and quiet: nothing but the page is to be fetched.
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--remote-debugging-port=0", f"--window-size={SIZE[0]},{SIZE[1]}",
)  # fmt: skip


class Page:
    """One page of the browser, and the screen that the app draws in it."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._calls = 0
        self.screen = pyte.Screen(1, 1)
        self._stream = pyte.ByteStream(self.screen)

    async def call(self, method: str, **parameters: object) -> Any:
        """Ask the browser; what it tells meanwhile is taken in."""
        self._calls += 1
        number = self._calls
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            said = await self._socket.receive_json(timeout=20)
            if said.get("id") == number:
                assert "error" not in said, said
                return said["result"]
            self._hear(said)

    def _hear(self, said: dict[str, Any]) -> None:
        if said["method"] not in ("Network.webSocketFrameReceived", "Network.webSocketFrameSent"):
            return
        frame = said["params"]["response"]
        if resized := re.match(r'\["resize",\{"width":(\d+),"height":(\d+)', frame["payloadData"]):
            self.screen.resize(int(resized[2]), int(resized[1]))
        elif said["method"].endswith("Received") and frame["opcode"] == 2:
            self._stream.feed(clean(base64.b64decode(frame["payloadData"])))

    @property
    def text(self) -> str:
        return "\n".join(self.screen.display)

    async def wait_for(self, pattern: str, seconds: float = 60) -> None:
        until = time.monotonic() + seconds
        while not re.search(pattern, self.text):
            assert time.monotonic() < until, f"never saw {pattern!r} in the browser:\n{self.text}"
            await self.call("Runtime.evaluate", expression="1")
            await asyncio.sleep(0.05)

    async def press(self, keys: str) -> None:
        for key in keys:
            name, text = ("Enter", "\r") if key == "\r" else (key, key)
            for kind, more in (("keyDown", {"text": text}), ("keyUp", {})):
                code = {"windowsVirtualKeyCode": 13} if key == "\r" else {}
                await self.call("Input.dispatchKeyEvent", type=kind, key=name, **more, **code)

    async def colours(self) -> int:
        """How many colours the picture has."""
        picture = base64.b64decode((await self.call("Page.captureScreenshot"))["data"])
        found = Image.open(io.BytesIO(picture)).convert("RGB").getcolors(1 << 24)
        assert found is not None
        return len(found)


@pytest.fixture
def browser() -> Iterator[int]:
    """A browser; the port on which it takes orders."""
    assert BROWSER is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        program = subprocess.Popen(
            [BROWSER, *OPTIONS, f"--user-data-dir={profile}", "about:blank"], stderr=subprocess.PIPE, text=True
        )
        try:
            assert program.stderr is not None
            found = (re.search(r"ws://127\.0\.0\.1:(\d+)/", line) for line in program.stderr)
            port = next((int(match[1]) for match in found if match), None)
            if port is None:
                pytest.skip("Chromium does not start here")
            yield port
        finally:
            program.kill()
            program.wait()


async def open_page(session: aiohttp.ClientSession, port: int) -> str:
    """The address at which the browser's first page takes orders."""
    async with session.get(f"http://127.0.0.1:{port}/json") as response:
        pages = await response.json()
    return next(page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page")


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here")
async def test_app_in_chromium_is_drawn_and_keys_cast_a_module(browser: int) -> None:
    with served("demo", *QUICK, *forked()) as (shown, _):
        await draw_and_cast(browser, shown)


async def draw_and_cast(browser: int, shown: str) -> None:
    """Open the address that the server printed, cast with keys, and look at the page."""
    async with aiohttp.ClientSession() as session:
        address = await open_page(session, browser)
        async with session.ws_connect(address, max_msg_size=0) as socket:
            page = Page(socket)
            for domain in ("Page", "Network"):
                await page.call(f"{domain}.enable")
            empty = await page.colours()
            await page.call("Page.navigate", url=shown)
            await page.wait_for("embed_tokens")
            await page.wait_for("ready")
            place = {"x": 300, "y": SIZE[1] - 350, "button": "left", "clickCount": 1}
            for kind in ("mousePressed", "mouseReleased"):
                await page.call("Input.dispatchMouseEvent", type=kind, **place)
            await page.press(":cast *.mlp bf16\r")
            await page.wait_for(r"\*\.mlp +bf16 +18")
            await page.wait_for(r"SQNR +\d\d\.\d\d dB")
            assert await page.colours() > empty + 10
