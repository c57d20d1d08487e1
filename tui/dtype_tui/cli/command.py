"""The command `dtype-tui`: reads the command line and the checkpoint's headers, and starts the app. It does not import torch."""

from __future__ import annotations

import dataclasses
import faulthandler
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from textual.binding import Binding

from dtype_engine.cli.options import MEASURING, ModelCommand, batch_option, byte_count, context_option
from dtype_engine.cli.parallel import workers_option
from dtype_engine.cli.program import BAD_INPUT
from dtype_engine.cli.request import RunRequest
from dtype_engine.cli.thresholds import all_limits, threshold_options
from dtype_engine.core.errors import UserError
from dtype_engine.core.input_args import check_files
from dtype_engine.recipe import rules_in_doubt
from dtype_engine.service.events import Event
from dtype_tui.state.addresses import is_address
from dtype_tui.state.launch import Launch

if TYPE_CHECKING:
    from dtype_engine.service.connection import Connection
    from dtype_engine.service.engine import Engine
    from dtype_tui.app import StartEngine
    from dtype_tui.config.config import Config
    from dtype_tui.state.session_saver import SessionSaver

_TOUR_SEQUENCES = 2
"""Number of sequences on which the tour runs the demo, so that it takes two minutes even on two busy cores."""


@click.command(
    cls=ModelCommand, also=MEASURING, checks_inputs=False, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(package_name="dtype-tui")
@click.option(
    "--resume",
    is_flag=True,
    help="Reopen the session that was saved last: the model, its recipe and what was measured. If MODEL is given, reopen the "
    "last session of that model.",
)
@click.option("--ascii", "in_ascii", is_flag=True, help="Draw the screen with ASCII characters only.")
@click.option(
    "--in-process",
    is_flag=True,
    help="Run the engine, which loads and runs the model, in a thread of this program. By default, it is a separate process.",
)
@click.option(
    "--engine-command",
    metavar="CMD",
    help="A command that starts the engine on another machine or in a container, such as 'docker exec -i BOX dtype-engine "
    "stdio'. MODEL is then a path or name there.",
)
@click.option(
    "--read-only",
    is_flag=True,
    help="For a screen that other people use: they can look around and cast layers, but they can't open, read or write "
    "files, and no session is saved.",
)
@context_option
@batch_option
@click.option(
    "--budget",
    type=byte_count,
    metavar="BYTES",
    help="Show, in the Memory pane, the longest context that fits in this amount of memory, such as 24GiB.",
)
@workers_option
@threshold_options
def command(
    request: RunRequest,
    in_ascii: bool,
    resume: bool,
    in_process: bool,
    engine_command: str | None,
    read_only: bool,
    context: int | None,
    batch: int,
    budget: int | None,
    workers: int | str | None,
    **limits: Any,
) -> int:
    """Explore a model in the terminal: cast its layers to other dtypes, and see at once how far its outputs drift and how much
    memory it takes.

    MODEL is a checkpoint folder or file, a Hugging Face id in the local cache, file.py:Name, package.module:Name, or `demo`, the
    built-in model. Without MODEL, a screen offers the models in this folder, in the Hugging Face cache and in recent sessions.
    hf://org/name is a model on a hub: only its headers are read, and `:download` downloads it. ssh://HOST/PATH is a model on
    another machine that has dtype-tui installed: the engine, which runs the model, is on that machine, the screen on this one.
    `dtype-tui tour` teaches the keys on the built-in model, and `dtype-tui serve` opens the app in a browser.
    """
    config = msgspec.structs.replace(configured(), ascii="always") if in_ascii else configured()
    model, options = request.model, dataclasses.replace(request.options, workers=workers, read_only=read_only)
    if engine_command is None and not is_address(model):
        check_files(options)
    saved = None
    begins_tour = model == "tour" and not resume and engine_command is None and not Path("tour").exists()
    if begins_tour:
        model = "demo"
        if "sequences" not in request.explicit:
            options = dataclasses.replace(options, sequences=_TOUR_SEQUENCES)
    if read_only and (begins_tour or (model is None and engine_command is None and not resume)):
        why = "the tour writes a recipe" if begins_tour else "name a MODEL, which viewers can not choose"
        raise UserError(f"--read-only: {why}")
    if resume:
        if engine_command is not None:
            raise UserError("--resume: sessions that use --engine-command are not saved")
        from dtype_tui.cli.resume import saved_session, with_saved_options

        saved = saved_session(model)
        model, options = saved.model, with_saved_options(options, saved.options, request.explicit)
        if options.reference != saved.options.reference:
            saved = dataclasses.replace(saved, measured=())  # the saved drifts are from another reference
    elif model is None and engine_command is None:
        _need_a_terminal()
        model = _chosen(config)
        if model is None:
            return 0
    if is_address(model) or is_address(options.reference_model):
        from dtype_tui.cli.remote import reference_there

        options = dataclasses.replace(options, reference=reference_there(model, options))
    request = msgspec.structs.replace(request, model=model, options=options)
    if in_process:
        # Textual draws on a copy of standard error, because the engine's thread redirects the descriptor while it runs tokenizers.
        sys.__stderr__ = sys.stderr = open(os.dup(2), "w", encoding=sys.stderr.encoding, errors="backslashreplace")  # type: ignore[misc]  # noqa: SIM115
        faulthandler.enable(sys.__stderr__)
    if engine_command is None and not is_address(model):
        launch, start_engine = _open_here(request, in_process)
    elif in_process:
        raise UserError("--in-process runs the engine in this program: it can't be combined with an engine elsewhere")
    else:
        from dtype_tui.cli.remote import connect
        from dtype_tui.process.early_engine import take

        _need_a_terminal()
        if (unneeded := take()) is not None:
            unneeded.kill()
        launch, start_engine = connect(model, engine_command, options, request.recipe)
    from dtype_tui.app import DtypeApp
    from dtype_tui.process.terminal import exit_on_terminal_loss
    from dtype_tui.state.first_start import is_first_start

    def session_saver() -> SessionSaver:
        from dtype_tui.state.session_saver import SessionSaver

        return SessionSaver(request.model, launch.title, launch.path, options)

    launch = msgspec.structs.replace(
        launch,
        settings=options.settings,
        thresholds=all_limits(limits, options.metrics),
        context=context,
        batch=batch,
        budget=budget,
        recipe=request.recipe,
        preset=request.preset,
        saved=saved,
        saver=session_saver if engine_command is None and not read_only else None,
        config=config,
        read_only=read_only,
        begins_tour=begins_tour,
        offers_tour=not begins_tour and not read_only and is_first_start(),
    )
    app = DtypeApp(launch, start_engine)
    exit_on_terminal_loss(app.on_unmount)
    app.run()
    # Textual returns 1 for an error in the program, and the app 128 and more for a signal that ended it.
    return BAD_INPUT if app.return_code == 1 else app.return_code or 0


def _open_here(request: RunRequest, in_process: bool) -> tuple[Launch, StartEngine]:
    """Read the headers of a model on this machine. Returns what the app shows, and a function that makes the engine."""
    from dtype_engine.checkpoint.source import DEMO

    options = request.options
    source = request.locate()
    tree, whole = source.peek()
    if request.recipe.rules and tree is not None and not whole:
        # A rule that matches nothing is refused before the screen opens, and that takes all the headers to decide.
        checkpoint = source.open()
        tree, whole = (checkpoint.tree() if checkpoint is not None else None), True
    _need_a_terminal()
    connection = None
    if tree is not None and rules_in_doubt(tree, request.recipe):
        if in_process:
            from dtype_engine.service.opening import refuse_unmatched

            refuse_unmatched(source, options, request.recipe)
        else:
            connection = _opened_by_engine(request)

    def make_engine(emit: Callable[[Event], None], wait: Callable[[], None]) -> Engine:
        if in_process:
            from dtype_engine.service.messages import safe
            from dtype_engine.service.worker import Worker

            return Worker(source, options, lambda event: emit(safe(event)), read_headers=not whole)
        from dtype_engine.service.connection import EngineCommand
        from dtype_engine.service.control import Open
        from dtype_engine.service.process import EngineProcess
        from dtype_tui.process.early_engine import take

        process = take() if connection is None else None
        message = Open(request.model, options, read_headers=not whole)
        return EngineProcess(EngineCommand(), message, emit, process=process, connection=connection, wait=wait)

    path = source.path if source.hub is None else None
    return Launch(source.title, tree, path, partial=not whole, is_demo=path == DEMO), make_engine


def _opened_by_engine(request: RunRequest) -> Connection:
    """Let an engine on this machine open the model before the screen opens, and return the connection to the engine. To check the
    rules, the engine imports the model's architecture. Raises UserError if a rule matches nothing.
    """
    from dtype_engine.service.connection import Connection, EngineCommand
    from dtype_engine.service.control import Open
    from dtype_tui.process.early_engine import take

    command = EngineCommand()
    connection = Connection(command, take() or command.start())
    connection.handshake()
    connection.open_model(Open(request.model, request.options, False, request.recipe))
    return connection


def _need_a_terminal() -> None:
    """Raise UserError if a standard stream is not a terminal and no browser shows the app. Textual draws on standard error."""
    if "TEXTUAL_DRIVER" in os.environ:
        return
    for name in ("COLUMNS", "LINES"):
        os.environ.pop(name, None)  # some shells export these; Textual would then ignore every resize
    if not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        raise UserError(
            "this is not a terminal; for scripts and jobs use dtype-engine, which answers the same questions"
        )


def _chosen(config: Config) -> str | None:
    """Let the user choose a model from a list, and return its name, or None if the user quits. If no model is found, return the
    demo without a question. Exits if the picker fails, after the picker has reported the error.
    """
    from dtype_engine.checkpoint.discovery import find_models
    from dtype_engine.checkpoint.source import locate
    from dtype_tui.cli.model_picker import DEMO, MOST_RECENT, ModelPicker, Offer
    from dtype_tui.cli.remote import address_of
    from dtype_tui.process.terminal import exit_on_terminal_loss
    from dtype_tui.state.session_store import recent_models

    offers = [Offer(found.model, found.place, found.nbytes, found.modified) for found in find_models(Path())]
    recent = [
        Offer(each.model, "opened recently", None, each.saved.timestamp()) for each in recent_models() if each.model
    ]
    if not offers and not recent:
        return DEMO.model

    def check(model: str) -> object:
        return address_of(model) if is_address(model) else locate(model)

    picker = ModelPicker([*recent[:MOST_RECENT], *offers, DEMO], check, config)
    exit_on_terminal_loss(lambda: None)
    model = picker.run()
    if picker.return_code == 1:
        sys.exit(BAD_INPUT)
    return model


@cache
def configured() -> Config:
    """Return the user's configuration, or the defaults if there is no file. Raises UserError if it is invalid."""
    from dtype_tui.config.config import Config, config_path, read_config

    if not config_path().exists():
        return Config()
    from textual.theme import BUILTIN_THEMES

    from dtype_tui.config.bindings import KEYS
    from dtype_tui.rendering.palette import THEMES
    from dtype_tui.widgets.module_tree import ModuleTree

    bindings = [binding for binding in (*KEYS, *ModuleTree.BINDINGS) if isinstance(binding, Binding)]
    themes = [*BUILTIN_THEMES, *(theme.name for theme in THEMES)]
    return read_config([binding.id for binding in bindings if binding.id], themes, click_options())


def click_options() -> dict[str, click.Option]:
    """Return click's options of `dtype-tui`, by name without dashes, such as `device`."""
    return {option.opts[0].lstrip("-"): option for option in command.params if isinstance(option, click.Option)}
