"""`dtype-engine worker`: prints the commands that start the workers of a Dask cluster."""

from __future__ import annotations

import click

from dtype_engine.cli.program import answer


@click.command
@click.argument("address", default="tcp://HOST:8786")
def worker(address: str) -> None:
    """Print the shell commands that start a Dask cluster. Commands with the option --workers ADDRESS, such as `scan`, then run the
    model on the cluster's workers. ADDRESS is the address of its scheduler, such as tcp://HOST:8786.
    """
    from dtype_engine.evaluation.cluster import worker_lines

    answer(worker_lines(address))
