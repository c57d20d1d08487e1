"""`dtype-tui serve`: the app in a browser, through textual-serve, for people who tunnel a port."""

from __future__ import annotations

import shlex
import sys

import click

from dtype_engine.errors import UserError
from dtype_engine.model.source import locate

from .start import collect_again


@click.command(context_settings={"help_option_names": ["-h", "--help"], "ignore_unknown_options": True})
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address to listen on; the default is this machine only."
)
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def serve(host: str, port: int, arguments: tuple[str, ...]) -> None:
    """Open the app in a browser: `dtype-tui serve [--port 8000] MODEL ...`, with what dtype-tui itself takes.

    Everyone who can reach the address can use the app, with your rights. Behind the default address only this machine can.
    """
    from .cli import command

    asked = command.make_context("dtype-tui", list(arguments)).params
    locate(asked["model"], asked["trust_pickle"], asked["download"])
    try:
        from textual_serve.server import Server
    except ImportError:
        raise UserError("serving needs textual-serve: pip install 'dtype-tui[serve]'") from None
    shown = f"[{host}]" if ":" in host else host
    print(f"dtype-tui: open http://{shown}:{port} in a browser; Ctrl+C ends it", file=sys.stderr)
    program = [sys.executable, "-m", "dtype_tui", *(arguments if asked["model"] else (*arguments, "demo"))]
    collect_again()
    try:
        Server(shlex.join(program), host=host, port=port, title="dtype-tui").serve()
    except OSError as error:
        raise UserError(f"can't listen on {shown}:{port}: {error.strerror or error}; --port takes another") from None
