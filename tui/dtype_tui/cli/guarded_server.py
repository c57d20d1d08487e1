"""A textual-serve server that only the user who started it can use: requests must carry a secret token."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import resource
import secrets
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import aiohttp_jinja2
from aiohttp import WSMsgType, web
from aiohttp.typedefs import Handler
from aiohttp.web_protocol import RequestHandler
from textual_serve.app_service import AppService
from textual_serve.server import Server, to_int

_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
_SHUTDOWN_SECONDS = 2.0
_LARGEST = 1000, 500
"""Maximum (columns, rows) of the screen in a page. Drawing a screen of a billion cells would take all memory."""


class GuardedServer(Server):
    """Serves the app below a secret path, and only to pages that the server itself has delivered.

    A person who controls the app has the user's rights. A listening port is open to the other users of this machine, and to any web
    page in the user's own browser: pages may open web sockets to any address, and a name on the internet can resolve to 127.0.0.1
    (DNS rebinding). Therefore every request must carry the token, must be addressed to a host name that only this server can have,
    and must not come from another page. All others get status 403.

    A connection that has sent no request with the token is a stranger's. The number and duration of such connections are limited,
    so that they can't use up the file descriptors.
    """

    def __init__(self, command: str, host: str, port: int, title: str) -> None:
        super().__init__(command, host=host, port=port, title=title)
        self.token = secrets.token_urlsafe(24)
        """The secret first part of the paths of all addresses but those of downloads."""
        self.most_strangers = _most_strangers()
        """Maximum number of open connections that have not sent the token. If one more is opened, the oldest of them is closed."""
        self.stranger_seconds = 10.0
        """Maximum number of seconds that a connection stays open without having sent the token."""
        self.most_apps = 16
        """Maximum number of pages that have the app open. Each page has processes of its own for the app and its engine."""
        self._apps = 0
        self._strangers: dict[RequestHandler, asyncio.TimerHandle] = {}

    @property
    def address(self) -> str:
        """The URL to open in a browser, with the token."""
        shown = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{shown}:{self.port}/{self.token}/"

    def serve(self, debug: bool = False) -> None:
        """Serve the app until the process receives SIGINT or SIGTERM. Raises OSError if the address can't be listened on."""
        logging.basicConfig(
            level=logging.WARNING, format="dtype-tui serve: %(message)s"
        )  # no paths: they have the token
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        ended = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
        async with self.listening():
            await ended.wait()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Serve the app within an `async with` block. Raises OSError if the address can't be listened on."""
        runner = web.AppRunner(await self._make_app(), access_log=None, shutdown_timeout=_SHUTDOWN_SECONDS)
        await runner.setup()
        loop = asyncio.get_running_loop()

        def connected() -> RequestHandler:
            assert runner.server is not None
            handler = runner.server()
            if len(self._strangers) >= self.most_strangers:
                self._close(next(iter(self._strangers)))
            self._strangers[handler] = loop.call_later(self.stranger_seconds, self._close, handler)
            return handler

        try:
            # asyncio accepts as many connections as the backlog at once, before `connected` can close others.
            async with await loop.create_server(connected, self.host, self.port, backlog=self.most_strangers):
                yield
        finally:
            await runner.cleanup()

    def _close(self, handler: RequestHandler) -> None:
        """Close a connection that has not sent the token, and discard data that is left to send."""
        self._admit(handler)
        if handler.transport is not None:
            handler.transport.abort()

    def _admit(self, handler: RequestHandler) -> None:
        """Record that a connection has sent the token."""
        timer = self._strangers.pop(handler, None)
        if timer is not None:
            timer.cancel()

    async def handle_download(self, request: web.Request) -> web.StreamResponse:
        """Send a file that the app offers for download. Its key is secret, like the token, so the connection may stay open."""
        with suppress(KeyError):
            await self.download_manager.get_download_metadata(request.match_info["key"])
            self._admit(request.protocol)
        return await super().handle_download(request)

    async def handle_websocket(self, request: web.Request) -> web.WebSocketResponse:
        """Start the app for a page, and connect the two until one ends. Refuses invalid sizes, and pages beyond `most_apps`."""
        width, height = (to_int(request.query.get(name, "1"), 0) for name in ("width", "height"))
        if not (0 < width <= _LARGEST[0] and 0 < height <= _LARGEST[1]):
            raise web.HTTPBadRequest(text=f"a page has 1 to {_LARGEST[0]} columns and 1 to {_LARGEST[1]} rows\n")
        if self._apps >= self.most_apps:
            raise web.HTTPServiceUnavailable(text=f"{self.most_apps} pages have the app open already\n")
        self._apps += 1
        try:
            return await super().handle_websocket(request)
        finally:
            self._apps -= 1

    async def _process_messages(self, websocket: web.WebSocketResponse, app_service: AppService) -> None:
        """Pass keys, sizes and changes of focus from a page to its app, answer pings, and ignore all other messages."""
        async for message in websocket:
            if message.type != WSMsgType.TEXT:
                continue
            try:
                sent = message.json()
            except (ValueError, RecursionError):
                continue
            match sent:
                case ["stdin", str(keys)]:
                    await app_service.send_bytes(keys.encode(errors="replace"))
                case ["resize", {"width": int(width), "height": int(height)}]:
                    columns, rows = (max(1, min(pair)) for pair in zip((width, height), _LARGEST, strict=True))
                    await app_service.set_terminal_size(columns, rows)
                case ["ping", str() | int() | float() as sign]:
                    await websocket.send_json(["pong", sign])
                case ["blur", *_]:
                    await app_service.blur()
                case ["focus", *_]:
                    await app_service.focus()

    async def _make_app(self) -> web.Application:
        outer = web.Application(middlewares=[self._guard])
        outer.add_subapp(f"/{self.token}", await super()._make_app())
        # The page requests a file that the app delivers without the token; the file's own key is just as hard to guess.
        outer.add_routes([web.get("/download/{key}", self.handle_download)])
        return outer

    async def on_startup(self, app: web.Application) -> None:
        """Print nothing, unlike textual-serve: the caller prints the address."""

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not self._is_meant(request.host):
            raise web.HTTPForbidden(text="this server does not go by that name\n")
        own = f"http://{request.host}".lower(), f"https://{request.host}".lower()
        if request.headers.get("Origin", own[0]).lower() not in own:
            raise web.HTTPForbidden(text="other pages may not use this server\n")
        first, _, rest = request.path.removeprefix("/").partition("/")
        if hmac.compare_digest(first.encode(), self.token.encode()):
            self._admit(request.protocol)
        elif not (first == "download" and rest):
            raise web.HTTPForbidden(text="open the whole address that dtype-tui serve printed\n")
        response = await handler(request)
        if not response.prepared:
            response.headers["Referrer-Policy"] = "no-referrer"  # it would reveal the token
        return response

    def _is_meant(self, host: str) -> bool:
        """Return whether a Host header names this server by a name that can't be used for DNS rebinding. Any port is accepted."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if name in _LOCAL or name == self.host.lower():
            return True
        if self.host in _LOCAL:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in (socket.gethostname().lower(), socket.getfqdn().lower())
        return True  # an IP address is not looked up, so rebinding can't affect it

    @aiohttp_jinja2.template("app_index.html")
    async def handle_index(self, request: web.Request) -> dict[str, Any]:
        """Return the values for the page's template. Its URLs use the host of the request, which may be that of a tunnel."""
        base = f"//{request.host}/{self.token}"
        return {
            "font_size": to_int(request.query.get("fontsize", "16"), 16),
            "app_websocket_url": f"ws:{base}/ws",
            "config": {"static": {"url": f"{base}/static/"}},
            "application": {"name": self.title},
        }


def _most_strangers() -> int:
    """Return `most_strangers`: 64 or, if that is less, a quarter of the file descriptors that this process may open."""
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 64 if descriptors == resource.RLIM_INFINITY else max(1, min(64, descriptors // 4))
