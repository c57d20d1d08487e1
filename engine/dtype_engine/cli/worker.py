"""`dtype-engine worker`: shows how to start the workers of a cluster."""

from __future__ import annotations

import click

from dtype_engine.cli.program import answer


@click.command
@click.argument("address", default="tcp://HOST:8786")
def worker(address: str) -> None:
    """Print the shell commands that start Dask workers, on which `scan --workers tcp://HOST:8786` and others run a model."""
    from dtype_engine.evaluation.cluster import worker_lines

    answer(worker_lines(address))
