"""`dtype-engine`: every question the app can ask, for scripts and jobs.

Results go to standard output (with `--json`, one object and nothing else), everything else to standard error.
Exit status: 0 done, 1 the answer is no, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import sys

import click

from .common import run
from .export import export, verify
from .recipe import recipe
from .report import report
from .running import drift, flow, inspect, speed, weights
from .scan import scan, search


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dtype-tui")
def cli() -> None:
    """What happens if these layers are in another dtype?

    MODEL is a checkpoint folder or file, a Hugging Face id in the local cache, file.py:Name, package.module:Name, or
    nothing for the built-in demo.
    """


for command in (inspect, drift, flow, speed, weights, scan, search, export, verify, recipe, report):
    cli.add_command(command)


def main() -> None:
    """The `dtype-engine` program."""
    sys.exit(run(cli, "dtype-engine"))
