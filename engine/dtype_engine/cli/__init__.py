"""`dtype-engine`: every question the app can ask, for scripts and jobs.

Results go to standard output (with `--json`, one object and nothing else), everything else to standard error.
Exit status: 0 done, 1 the answer is no, 2 bad input, 130 interrupted (143 and 129: killed, hung up), 141 nobody reads the answer.
"""

from __future__ import annotations

import gc
import sys
from importlib import import_module

import click

from dtype_engine.cli.program import BAD_INPUT, run
from dtype_engine.cli.versions import print_version

_PLACES = {
    "inspect": "inspect", "drift": "drift", "flow": "drift", "speed": "drift", "weights": "inspect", "scan": "scan",
    "search": "scan", "sweep": "sweep",
    "check": "check", "export": "export", "verify": "export", "recipe": "recipe", "report": "report", "stdio": "stdio",
    "worker": "worker",
}  # fmt: skip


class _Commands(click.Group):
    """Each command is imported when it is asked for: all of them take longer than most take to answer."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_PLACES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _PLACES:
            return None
        found = getattr(import_module(f".{_PLACES[cmd_name]}", __package__), cmd_name)
        assert isinstance(found, click.Command)
        return found


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--verbose", is_flag=True, is_eager=True, expose_value=True, help="With --version: libraries and hardware as well."
)
@click.option("--version", is_flag=True, expose_value=False, callback=print_version, help="Show the version and exit.")
def cli(verbose: bool) -> None:
    """What happens if these layers are in another dtype?

    MODEL is a checkpoint folder or file, a Hugging Face id in the local cache, file.py:Name, package.module:Name, or
    nothing for the built-in demo.
    """
    if verbose:
        raise click.UsageError("--verbose goes with --version")


def main() -> None:
    """The `dtype-engine` program."""
    if sys.stdout is None:  # closed when Python began
        if sys.stderr is not None:
            print(
                "dtype-engine: standard output is closed, and answers go there: redirect it to a file", file=sys.stderr
            )
        sys.exit(BAD_INPUT)
    status = run(cli, "dtype-engine")
    # Python's last collection goes over all that torch and transformers have made: 0.7 s of a `drift` of 10.
    gc.freeze()
    sys.exit(status)
