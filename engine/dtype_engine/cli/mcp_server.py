"""`dtype-engine mcp`: serves commands as tools to agents that speak the Model Context Protocol, on standard input and output.

A call (`mcp_calls.py`) can name only models and text files in the allowed folders. It can't give options that run code, download
or write files.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dtype_engine.cli.mcp_input import repair_input
from dtype_engine.cli.mcp_tools import Access
from dtype_engine.core.errors import UserError

if TYPE_CHECKING:
    from dtype_engine.cli.mcp_calls import Server

ENGINE = (sys.executable, "-P", "-c", "from dtype_engine.cli.mcp_child import main; main()")
"""The words of the command line that starts `dtype-engine` for a call, without its arguments."""


@click.command("mcp")
@click.option(
    "--allow",
    "folders",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="A folder from which agents may read models and text files; may be repeated.  [default: the working directory]",
)
@click.option(
    "--hub",
    is_flag=True,
    help="Also let agents read models on a hub (hf://org/name) and in the local Hugging Face cache.",
)
@click.option(
    "--seconds",
    type=click.IntRange(min=1),
    default=600,
    show_default=True,
    help="The time limit for each call of a tool, in seconds. A call that takes longer is stopped with an error.",
)
def mcp(folders: tuple[Path, ...], hub: bool, seconds: int) -> None:
    """Serve the commands inspect, drift (also against another checkpoint), scan, search and check as tools for AI agents, by the
    Model Context Protocol (MCP) on standard input and output.

    Agents start this command themselves; users name it in the agent's configuration. It needs `pip install 'dtype-tui[mcp]'`.
    """
    if sys.stdin.isatty():
        raise UserError("this is for programs: an agent's configuration names the command `dtype-engine mcp`")
    server = make_server(Access(folders or (Path(),), hub), seconds)
    _end_with_signals()
    repair_input()
    try:
        server.run()
    except BaseExceptionGroup as group:  # such as of the ReaderGone of a client that has closed standard output
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


def _end_with_signals() -> None:
    """Make the signals that ask a program to end do so at once, unless they are ignored. The process of a call then ends by itself.

    An exception would first wait for the threads that read standard input and write standard output, as long as the agent likes.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: os._exit(128 + number))


def make_server(access: Access, seconds: float, engine: Sequence[str] = ENGINE) -> Server:
    """Return a server that offers `TOOLS`. seconds: the time limit of a call. engine: the command that starts `dtype-engine`.
    Raises UserError if `mcp` is not installed.
    """
    try:
        from dtype_engine.cli.mcp_calls import Server
    except ImportError:
        raise UserError("the package mcp is not installed: pip install 'dtype-tui[mcp]'") from None
    return Server(access, seconds, engine)
