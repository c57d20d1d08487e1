"""`dtype-tui serve`: serves the app to a browser through textual-serve."""

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
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="The network address to listen on. The default can be reached only from this machine.",
)
@click.option(
    "--port", type=click.IntRange(1, 65535), default=8000, show_default=True, help="The TCP port to listen on."
)
@click.option(
    "--read-only", is_flag=True, help="Let viewers look around and cast layers, but not open, read or write files."
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def serve(host: str, port: int, read_only: bool, arguments: tuple[str, ...]) -> None:
    """Open the app in a browser: `dtype-tui serve [--port 8000] MODEL ...`, with any arguments of dtype-tui.

    The command prints the address to open, which contains a new secret token each time. Anyone who has the whole address and can
    reach it can use the app, with your rights, unless you say --read-only. Without the token the app can't be used, not even by
    other web pages in the same browser. The connection is not encrypted: over a network, use a tunnel, not --host.
    """
    if read_only:
        arguments = ("--read-only", *arguments)
    chosen = command.make_context("dtype-tui", list(arguments)).params
    if not is_address(chosen["model"]) and chosen["engine_command"] is None:
        locate(chosen["model"], chosen["trust_pickle"], chosen["download"], base=chosen["base"])
    try:
        from dtype_tui.cli.guarded_server import GuardedServer
    except ImportError:
        raise UserError("serving needs textual-serve: pip install 'dtype-tui[serve]'") from None
    # -P keeps the current folder off Python's module path: it may be a downloaded folder with a malicious click.py.
    named = arguments if chosen["model"] or chosen["engine_command"] else (*arguments, "demo")
    program = [sys.executable, "-P", "-m", "dtype_tui", *named]
    server = GuardedServer(shlex.join(program), host=host, port=port, title="dtype-tui")
    print(f"dtype-tui: open {server.address} in a browser; Ctrl+C ends it", file=sys.stderr)
    resume_gc()
    try:
        server.serve()
    except OSError as error:
        where = server.address.removeprefix("http://").partition("/")[0]
        raise UserError(f"can't listen on {where}: {error.strerror or error}; --port takes another") from None
