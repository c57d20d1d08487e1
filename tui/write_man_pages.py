"""Generate the manual pages of both programs from their help.

    python tui/write_man_pages.py FOLDER

`man -l FOLDER/dtype-tui.1` shows a page. `man dtype-tui` finds it if it is in the folder man1 of a folder on MANPATH.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import click

from dtype_engine.cli import cli
from dtype_engine.core.version import __version__
from dtype_tui.cli.command import command
from dtype_tui.cli.serve import serve

NAMES = {
    "dtype-engine": "drift, memory, scans and exports of models in mixed dtypes",
    "dtype-tui": "what happens if these layers are in another dtype?",
}
STATUS = {
    "0": "Done.",
    "1": "A check failed: a limit is exceeded, or two checkpoints differ.",
    "2": "Bad input; a one-line message names it.",
    "129, 130, 131, 143": "Ended by a hang-up, an interrupt, a quit or a termination signal.",
    "135": "A file of the model was cut short while it was read; a one-line message names it.",
}
FILES = {
    "$XDG_CONFIG_HOME/dtype-tui/config.yaml": "Theme, keys and defaults.",
    "$XDG_STATE_HOME/dtype-tui/sessions": "Sessions, for --resume.",
    "$XDG_STATE_HOME/dtype-tui/statistics": "Statistics of calibration inputs, for roundings such as GPTQ.",
}


def page(program: str, commands: dict[str, click.Command]) -> str:
    """Return a program's manual page, in roff's man macros. commands: keyed by what the user types, like `dtype-engine drift`."""
    other = next(name for name in NAMES if name != program)
    lines = [f'.TH {program.upper()} 1 "" "dtype-tui {__version__}" "User Commands"', ".SH NAME"]
    lines.append(f"{program} \\- {_plain(NAMES[program])}")
    lines.append(".SH SYNOPSIS")
    for typed, one in commands.items():
        usage = " ".join(one.collect_usage_pieces(click.Context(one)))
        lines += [f".B {_plain(typed)}", _plain(usage), ".br"]
    for typed, one in commands.items():
        lines += [".SH DESCRIPTION" if typed == program else f'.SH "{_plain(typed.upper())}"']
        lines += list(_described(one))
    for title, entries in (("EXIT STATUS", STATUS), ("FILES", FILES)):
        lines.append(f'.SH "{title}"')
        for name, meaning in entries.items():
            lines += [".TP", f".B {_plain(name)}", _plain(meaning)]
    lines += [".SH SEE ALSO", f".BR {_plain(other)} (1)", ""]
    return "\n".join(lines)


def _described(command: click.Command) -> Iterator[str]:
    for paragraph in textwrap.dedent(command.help or "").strip().split("\n\n"):
        yield from (_plain(" ".join(paragraph.split())), ".PP")
    context = click.Context(command)
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and record[1]:
            yield from (".TP", f".B {_plain(record[0])}", _plain(record[1]))


def _plain(text: str) -> str:
    """Return text escaped for roff, so that it is neither a control line nor an escape sequence, and so that its hyphens can be
    copied.
    """
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped


def _all(typed: str, command: click.Command) -> dict[str, click.Command]:
    """Return a command and all its subcommands except hidden ones, keyed by what the user types."""
    found = {typed: command}
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is not None and not below.hidden:
                found |= _all(f"{typed} {name}", below)
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    programs = {
        "dtype-engine": _all("dtype-engine", cli),
        "dtype-tui": {"dtype-tui": command, "dtype-tui serve": serve},
    }
    for program, commands in programs.items():
        (folder / f"{program}.1").write_text(page(program, commands), encoding="utf-8")


if __name__ == "__main__":
    main()
