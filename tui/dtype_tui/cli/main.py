"""The `dtype-tui` program: the app's command, with defaults from the configuration file, or the command `serve`."""

from __future__ import annotations

import sys
from typing import Any

import click

from dtype_engine.cli.program import BAD_INPUT, report_unexpected, run
from dtype_engine.core.errors import UserError
from dtype_engine.core.text import printable
from dtype_tui.cli.command import click_options, command, configured
from dtype_tui.config.config import config_path


def configured_defaults() -> dict[str, Any]:
    """Return the options' default values from the configuration file, as click expects them. Raises UserError."""
    known = click_options()
    found: dict[str, Any] = {}
    for name, value in configured().defaults.items():
        option = known[name]
        values = value if isinstance(value, list) else [value]
        are_plain = all(isinstance(one, (str, int, float)) for one in values)
        if not are_plain or (isinstance(value, list) and not option.multiple):
            takes = "a value or a list of them" if option.multiple else "one value"
            shown = printable(repr(value), 60)
            raise UserError(f"{config_path()}: defaults: {printable(name)} takes {takes}, not {shown}")
        texts = [one if isinstance(one, bool) else str(one) for one in values]
        found[option.name or name] = texts if option.multiple else texts[0]
        try:
            option.type_cast_value(click.Context(command), found[option.name or name])
        except click.BadParameter as error:
            raise UserError(f"{config_path()}: defaults: {name}: {printable(error.message, 200)}") from None
    return found


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        from dtype_tui.cli.serve import serve

        sys.exit(run(serve, "dtype-tui serve", sys.argv[2:]))
    try:
        command.context_settings["default_map"] = configured_defaults()
    except UserError as error:
        print(f"dtype-tui: {error}", file=sys.stderr)
        sys.exit(BAD_INPUT)
    except Exception as error:
        sys.exit(report_unexpected("dtype-tui", error))
    sys.exit(run(command, "dtype-tui"))
