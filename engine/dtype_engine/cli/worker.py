"""`dtype-engine worker`: how to start workers of a cluster."""

from __future__ import annotations

import click


@click.command
@click.argument("address", default="tcp://HOST:8786")
def worker(address: str) -> None:
    """Print the lines that start workers for --workers tcp://HOST:8786."""
    from dtype_engine.evaluation.cluster import worker_lines

    click.echo(worker_lines(address))
