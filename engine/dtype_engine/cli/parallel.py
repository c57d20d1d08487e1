"""`--workers`: the option, and the pool that it stands for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from dtype_engine.cli.program import note
from dtype_engine.core.text import printable
from dtype_engine.core.units import plural

if TYPE_CHECKING:
    from dtype_engine.checkpoint.source import Source
    from dtype_engine.evaluation.work import Over, Pace
    from dtype_engine.runtime.session import Session


def _workers(ctx: click.Context, param: click.Parameter, value: str | None) -> str | int | None:
    """A number of processes, or the address of a scheduler."""
    if value is None or value.startswith(("tcp://", "tls://")):
        return value
    if not re.fullmatch("[0-9]{1,4}", value) or not int(value):
        raise click.BadParameter(
            f"{printable(value, 80)!r} is neither a number of processes nor tcp://HOST:PORT", ctx, param
        )
    return int(value)


workers_option = click.option(
    "--workers",
    callback=_workers,
    metavar="N|tcp://HOST:8786",
    help="Work in N processes that share the checkpoint's pages, no more than memory holds, or on a Dask cluster.  "
    "[default: in this process]",
)


@contextmanager
def over_workers(
    workers: str | int | None, session: Session, source: Source, typed: str | None, parts: int, private: int
) -> Iterator[tuple[Over | None, Pace]]:
    """The workers, None for this process, and how to say how far they are.

    parts: how many pieces of work there are. private: bytes that each process holds beside the mapped checkpoint.
    """
    from dtype_engine.evaluation.pool import ProcessPool, fitting
    from dtype_engine.evaluation.work import Over, Pace, opened_as
    from dtype_engine.runtime.opening import threads_each

    if workers is None:
        yield None, Pace(1)
        return
    if isinstance(workers, str):
        from dtype_engine.evaluation.cluster import DaskPool

        opened = opened_as(session, source, typed, threads_each(session.options.threads, 1))
        with DaskPool(workers) as cluster:
            yield Over(cluster, opened), Pace(cluster.workers)
        return
    wanted = max(1, min(workers, parts))
    fit = fitting(wanted, private)
    if fit < wanted:
        note([f"the memory that is free holds {plural(fit, 'worker')} of the {workers} asked for"])
    opened = opened_as(session, source, typed, threads_each(session.options.threads, fit))
    with ProcessPool(fit) as pool:
        yield Over(pool, opened), Pace(fit)
