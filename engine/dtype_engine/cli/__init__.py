"""The command line `dtype-engine`: everything that the app can do, for scripts and batch jobs.

Results go to standard output (with `--json`: exactly one JSON object); progress, notes and errors go to standard error.
Exit status: 0 success; 1 a check failed; 2 bad input; 129, 130, 131, 143 ended by SIGHUP, SIGINT, SIGQUIT, SIGTERM; 135 a
file was cut short while it was read; 141 standard output closed.
"""

from __future__ import annotations

import gc
import sys
from importlib import import_module

import click

from dtype_engine.cli.program import BAD_INPUT, run
from dtype_engine.cli.versions import print_version

_MODULES = {
    "inspect": "inspect", "memory": "memory", "drift": "drift", "flow": "drift", "speed": "drift", "weights": "weights",
    "scan": "scan",
    "search": "scan", "sweep": "sweep",
    "check": "check", "export": "export", "verify": "export", "recipe": "recipe", "report": "report", "stdio": "stdio",
    "worker": "parallel", "mcp": "mcp_server",
}  # fmt: skip


class _Commands(click.Group):
    """A group that imports a command's module when the command runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _MODULES:
            return None
        found = getattr(import_module(f".{_MODULES[cmd_name]}", __package__), cmd_name)
        assert isinstance(found, click.Command)
        return found


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--verbose",
    is_flag=True,
    is_eager=True,
    help="With --version: also show the versions of Python and of the libraries, and the hardware.",
)
@click.option("--version", is_flag=True, expose_value=False, callback=print_version, help="Show the version and exit.")
def cli(verbose: bool) -> None:
    """Show what happens to a model's output, memory and speed if some of its layers are cast to another dtype.

    MODEL, which most commands take, is a checkpoint folder or file, a Hugging Face id in the local cache, hf://org/name (a model on
    a hub, of which only headers are read), or Python code: file.py:Name or package.module:Name. Without MODEL, the built-in demo
    model is used.
    """
    if verbose:
        raise click.UsageError("--verbose goes with --version")


def main() -> None:
    """Run the command line and exit with its exit status."""
    if sys.stdout is None:  # it was closed when Python started
        if sys.stderr is not None:
            print(
                "dtype-engine: standard output is closed, and answers go there: redirect it to a file", file=sys.stderr
            )
        sys.exit(BAD_INPUT)
    status = run(cli, "dtype-engine")
    # The garbage collection at exit would visit every object of torch and transformers: 0.7 s of a `drift` that takes 10 s. But
    # triton, which comes with torch's builds for CUDA, writes pages to standard error where its objects are left at exit.
    if "triton" in sys.modules:
        gc.unfreeze()
    else:
        gc.freeze()
    sys.exit(status)
