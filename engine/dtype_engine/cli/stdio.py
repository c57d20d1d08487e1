"""`dtype-engine stdio`: runs the engine for an app on another machine."""

from __future__ import annotations

import re
import sys

import click

from dtype_engine.core.errors import UserError
from dtype_engine.core.text import printable


def _seconds(text: str) -> float:
    found = re.fullmatch(r"([0-9]{1,6})([smh])", text)
    if found is None:
        raise ValueError(f"{printable(text, 40)!r} is not a time: write 90s, 10m or 2h")
    return int(found[1]) * {"s": 1.0, "m": 60.0, "h": 3600.0}[found[2]]


def _token(text: str) -> str:
    if not re.fullmatch(r"[0-9A-Za-z]{1,40}", text):
        raise ValueError("at most 40 letters and digits")
    return text


@click.command(context_settings={"max_content_width": 100})
@click.option(
    "--compressed",
    is_flag=True,
    help="Compress the messages that the engine sends to dtype-tui, for a slow connection.",
)
@click.option(
    "--linger",
    type=_seconds,
    metavar="TIME",
    help="If the connection is cut, finish the running work, then wait for dtype-tui to reconnect, at most this long: 90s, "
    "10m or 2h. Needs --session. Without --linger, the engine ends at once.",
)
@click.option(
    "--session",
    type=_token,
    metavar="TOKEN",
    help="With --linger: a text of letters and digits, chosen by dtype-tui, by which it finds this engine when it reconnects.",
)
def stdio(compressed: bool, linger: float | None, session: str | None) -> None:
    """Run the engine, which loads and runs the model, for a dtype-tui on another machine. The two talk through standard input and
    output.

    Programs start this command: `dtype-tui ssh://HOST/PATH` runs it on HOST through ssh, and `dtype-tui --engine-command 'docker
    exec -i BOX dtype-engine stdio'` runs it in a container. If the quoted command ends with `--linger 10m --session {session}`,
    dtype-tui replaces {session} with a token, and can reconnect without losing work if the connection is cut. Both machines must
    have the same version of dtype-tui.
    """
    if (linger is None) is not (session is None):
        raise UserError("--linger and --session go together")
    if sys.stdin.isatty():
        raise UserError("this is for programs: dtype-tui ssh://HOST/PATH runs it on HOST")
    from dtype_engine.service.stdio import main

    if linger is None or session is None:
        main(compressed)
    else:
        from dtype_engine.service.linger import relay

        sys.exit(relay(session, linger, compressed))
