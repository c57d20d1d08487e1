"""A textual-serve server that only the user who started it can use: it answers only requests that carry the secret token."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
from typing import Any
from urllib.parse import urlsplit

import aiohttp_jinja2
from aiohttp import web
from aiohttp.typedefs import Handler
from textual_serve.server import Server, to_int

_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})


class GuardedServer(Server):
    """Serves the app below a secret path, and only to its own pages.

    A person who controls the app has the user's rights. A listening port is open to the other users of this machine, and to any web
    page in the user's own browser: pages may open web sockets to any address, and a name on the internet can resolve to 127.0.0.1
    (DNS rebinding). Therefore every request must carry the token, must be addressed to a host name that only this server can have,
    and must not come from another page. The server answers all other requests with status 403.
    """

    def __init__(self, command: str, host: str, port: int, title: str) -> None:
        super().__init__(command, host=host, port=port, title=title)
        self.token = secrets.token_urlsafe(24)

    @property
    def address(self) -> str:
        """The URL to open in a browser."""
        shown = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{shown}:{self.port}/{self.token}/"

    async def _make_app(self) -> web.Application:
        outer = web.Application(middlewares=[self._guard])
        outer.add_subapp(f"/{self.token}", await super()._make_app())
        # The page requests a file that the app delivers without the token; the file's own key is just as hard to guess.
        outer.add_routes([web.get("/download/{key}", self.handle_download)])
        return outer

    async def on_startup(self, app: web.Application) -> None:
        """Print nothing. textual-serve would print the address, but the caller of this class does that."""

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not self._is_meant(request.host):
            raise web.HTTPForbidden(text="this server does not go by that name\n")
        origin = request.headers.get("Origin")
        if origin is not None and origin.lower() not in (
            f"http://{request.host}".lower(),
            f"https://{request.host}".lower(),
        ):
            raise web.HTTPForbidden(text="other pages may not use this server\n")
        first, _, rest = request.path.removeprefix("/").partition("/")
        if not hmac.compare_digest(first.encode(), self.token.encode()) and not (first == "download" and rest):
            raise web.HTTPForbidden(text="open the whole address that dtype-tui serve printed\n")
        response = await handler(request)
        if not response.prepared:
            response.headers["Referrer-Policy"] = "no-referrer"  # it would reveal the token
        return response

    def _is_meant(self, host: str) -> bool:
        """Return whether a request's Host header names this server, by a name or address that an attacker can't redirect to it.

        Any port is accepted, because a tunnel may use another port at its far end.
        """
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
        """Return the page.

        Its URLs use the host that the request names, because the far end of a tunnel has its own host name and port.
        """
        base = f"//{request.host}/{self.token}"
        return {
            "font_size": to_int(request.query.get("fontsize", "16"), 16),
            "app_websocket_url": f"ws:{base}/ws",
            "config": {"static": {"url": f"{base}/static/"}},
            "application": {"name": self.title},
        }
