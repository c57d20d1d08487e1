"""`dtype-tui serve`: the app in a browser, through textual-serve, for people who tunnel a port."""

from __future__ import annotations

import shlex
import sys

import click

from dtype_engine.checkpoint.source import locate
from dtype_engine.core.errors import UserError
from dtype_tui.cli.command import command
from dtype_tui.process.gc_policy import resume_gc
from dtype_tui.state.addresses import is_address


@click.command(context_settings={"help_option_names": ["-h", "--help"], "ignore_unknown_options": True})
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address to listen on; the default is this machine only."
)
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def serve(host: str, port: int, arguments: tuple[str, ...]) -> None:
    """Open the app in a browser: `dtype-tui serve [--port 8000] MODEL ...`, with what dtype-tui itself takes.

    It prints the address to open, which has a token that nobody can guess and that is new each time. Whoever has the whole
    address and can reach it can use the app, with your rights; nobody else can, other web pages in the same browser included.
    The connection is not encrypted: over a network use a tunnel, not --host.
    """
    asked = command.make_context("dtype-tui", list(arguments)).params
    if not is_address(asked["model"]) and asked["engine_command"] is None:
        locate(asked["model"], asked["trust_pickle"], asked["download"])
    try:
        from dtype_tui.cli.guarded_server import GuardedServer
    except ImportError:
        raise UserError("serving needs textual-serve: pip install 'dtype-tui[serve]'") from None
    # -P: the folder that this was started in is not where Python looks for modules. It may be one that was downloaded, with a
    # click.py of its own.
    named = arguments if asked["model"] or asked["engine_command"] else (*arguments, "demo")
    program = [sys.executable, "-P", "-m", "dtype_tui", *named]
    server = GuardedServer(shlex.join(program), host=host, port=port, title="dtype-tui")
    print(f"dtype-tui: open {server.address} in a browser; Ctrl+C ends it", file=sys.stderr)
    resume_gc()
    try:
        server.serve()
    except OSError as error:
        where = server.address.removeprefix("http://").partition("/")[0]
        raise UserError(f"can't listen on {where}: {error.strerror or error}; --port takes another") from None
