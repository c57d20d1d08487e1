"""`dtype-engine stdio`: the far end of an app that runs elsewhere."""

from __future__ import annotations

import sys

import click

from dtype_engine.core.errors import UserError


@click.command(context_settings={"max_content_width": 100})
@click.option("--compressed", is_flag=True, help="Compress what the app is told.")
def stdio(compressed: bool) -> None:
    """Be the engine of a dtype-tui that runs elsewhere, on standard input and output.

    Nobody types this: `dtype-tui ssh://HOST/PATH` runs it on HOST through ssh, and `dtype-tui --engine-command 'docker exec -i BOX
    dtype-engine stdio'` runs it wherever that leads. What is on the wire are messages of one version of dtype-tui to the same.
    """
    if sys.stdin.isatty():
        raise UserError("this is for programs: dtype-tui ssh://HOST/PATH runs it on HOST")
    from dtype_engine.worker.stdio import main

    main(compressed)
