"""The option `--workers`, the code that starts the workers, and `dtype-engine worker`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import click

from dtype_engine.cli.program import answer, note, say_count
from dtype_engine.core.units import plural

if TYPE_CHECKING:
    from dtype_engine.checkpoint.source import Source
    from dtype_engine.evaluation.work import Over
    from dtype_engine.runtime.session.session import Session


def _workers(text: str) -> str | int:
    from dtype_engine.evaluation.workers import parse_workers  # imported late, for a faster first paint of the app

    return parse_workers(text)


workers_option = click.option(
    "--workers",
    type=_workers,
    metavar="N|tcp://HOST:8786",
    help="Run forward passes in parallel: in this number of processes on this machine, or on the workers of the Dask cluster "
    "whose scheduler has this address, such as tcp://HOST:8786. `drift` takes it only with --causes. Fewer processes start if "
    "the memory is too small for all.  [default: in this process]",
)


@contextmanager
def over_workers(
    workers: str | int | None, session: Session, source: Source, parts: int, private: int
) -> Iterator[tuple[Over | None, Callable[[int, int], None]]]:
    """A context manager that starts the workers for a command. It yields (the workers or None for this process, a function
    `show(done, total)` that shows the progress). parts: the number of independent tasks. private: bytes that each process needs in
    addition to the mapped checkpoint.
    """
    if workers is None:
        yield None, partial(say_count, plural(1, "worker"))
        return
    from dtype_engine.evaluation.workers import Workers

    with Workers(workers, lambda sentence: note([sentence]), max(1, parts)) as started:
        over = started.over(session, source, private)
        yield over, partial(say_count, plural(over.pool.workers, "worker"))


@click.command
@click.argument("address", default="tcp://HOST:8786")
def worker(address: str) -> None:
    """Print the shell commands that start a Dask cluster. Commands with the option --workers ADDRESS, such as `scan`, then run the
    model on the cluster's workers. ADDRESS is the address of its scheduler, such as tcp://HOST:8786.
    """
    from dtype_engine.evaluation.cluster import worker_lines

    answer(worker_lines(address))
