"""`dtype-tui`: read the command line, read the headers, open the screen. torch is imported later, by the engine's
thread.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from dtype_engine.cli.common import (
    cast_options,
    model_argument,
    options_from,
    read_rules,
    refuse_unmatched,
    run,
    run_options,
    settled,
    with_options,
)
from dtype_engine.cli.thresholds import threshold_options, thresholds_from
from dtype_engine.errors import UserError
from dtype_engine.events import Event
from dtype_engine.text import read_text


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dtype-tui")
@model_argument
@with_options(cast_options)
@with_options(run_options)
@with_options(threshold_options)
def command(
    model: str | None,
    casts: tuple[str, ...],
    recipe_file: Path | None,
    **run_settings: Any,
) -> None:
    """What happens if these layers are in another dtype?

    MODEL is a checkpoint folder or file, a Hugging Face id in the local cache, file.py:Name, package.module:Name, or
    nothing for the built-in demo.
    """
    from dtype_engine.model.source import locate

    limits = thresholds_from(run_settings)
    recipe = read_rules(casts, recipe_file)
    options = settled(options_from(**run_settings))
    source = locate(model, options.trust_pickle, options.download)
    tree, whole = source.glance()
    if recipe.rules and tree is not None and not whole:
        # A rule that takes nothing is refused before the screen opens, and only all the headers tell.
        checkpoint = source.open()
        tree, whole = (checkpoint.tree() if checkpoint is not None else None), True
    for text in options.texts:
        read_text(text)
    if not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):  # Textual draws on standard error
        raise UserError(
            "this is not a terminal; for scripts and jobs use dtype-engine, which answers the same questions"
        )
    if tree is not None:
        refuse_unmatched(source, tree, recipe, options)
    from dtype_engine.worker import Worker

    from .app import DtypeApp

    workers: list[Worker] = []

    def start_worker(emit: Callable[[Event], None]) -> Worker:
        workers.append(Worker(source, options, emit, read_headers=not whole))
        return workers[0]

    app = DtypeApp(source.title, tree, start_worker, options.settings, whole)
    app.experiment.thresholds = limits
    app.start_with(recipe)
    app.run()
    if any(worker.alive for worker in workers):
        # Still importing torch, say. Taking an interpreter down around such a thread can crash it; the terminal is restored.
        os._exit(app.return_code or 0)


def main() -> None:
    """The `dtype-tui` program."""
    sys.exit(run(command, "dtype-tui"))
