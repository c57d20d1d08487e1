"""The command line `dtype-engine`: everything that the app can do, for scripts and batch jobs.

Results go to standard output (with `--json`: exactly one JSON object); progress, notes and errors go to standard error.
Exit status: 0 success; 1 a check failed; 2 bad input; 128 + n ended by signal n, such as 130 (SIGINT) and 143 (SIGTERM); 135 a
file was cut short while it was read; 141 standard output closed.
"""

from __future__ import annotations

import gc
import os
import platform
import sys
from importlib import import_module
from pathlib import Path

import click

from dtype_engine.cli.program import BAD_INPUT, answer, run
from dtype_engine.core.version import __version__

_MODULES = {
    "inspect": "inspect", "memory": "memory", "drift": "drift", "flow": "drift", "speed": "drift",
    "tokens": "tokens", "weights": "weights", "scan": "scan",
    "check-execution": "execution", "search": "scan", "sweep": "sweep",
    "check": "check", "export": "export", "verify": "export", "recipe": "recipe", "report": "report", "stdio": "stdio",
    "worker": "parallel", "mcp": "mcp_server",
}  # fmt: skip
_LIBRARIES = ("torch", "transformers", "safetensors", "textual", "gguf", "numpy")


class _Commands(click.Group):
    """A group that imports a command's module when the command runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _MODULES:
            return None
        found = getattr(import_module(f".{_MODULES[cmd_name]}", __package__), cmd_name.replace("-", "_"))
        assert isinstance(found, click.Command)
        return found


def _print_version(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    """Print the version and exit if `wanted`, the option's value, is True. With `--verbose`, also print the libraries and the
    hardware, which may affect measured metrics.
    """
    if not wanted or context.resilient_parsing:
        return
    if not context.params.get("verbose"):
        answer(f"dtype-engine, version {__version__}")
        context.exit()
    from dtype_engine.reports.versions import installed
    from dtype_engine.runtime.device import hardware

    named = {"dtype-tui": __version__, "python": platform.python_version()}
    named |= {name: installed(name) or "not installed" for name in _LIBRARIES}
    named |= {"platform": platform.platform(), "processor": f"{_processor()}, {os.cpu_count()} cores"} | hardware()
    for name, value in named.items():
        answer(f"{name:<13} {value}")
    context.exit()


def _processor() -> str:
    """Return the processor's model name, on Linux from /proc/cpuinfo, because `platform` knows only the architecture there."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--verbose",
    is_flag=True,
    is_eager=True,
    help="With --version: also show the versions of Python and of the libraries, and the hardware.",
)
@click.option("--version", is_flag=True, expose_value=False, callback=_print_version, help="Show the version and exit.")
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
