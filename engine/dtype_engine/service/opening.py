"""Opens a model or, if it can't be opened as a whole, the parts of it that can be opened."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from dtype_engine.core.errors import NoForward, UserError
from dtype_engine.core.foreign_code import foreign_code, with_type
from dtype_engine.recipe import Recipe, require_matches, rules_in_doubt
from dtype_engine.service import events
from dtype_engine.service.imports import finish_imports
from dtype_engine.service.open_model import OpenModel

if TYPE_CHECKING:
    from dtype_engine.checkpoint.source import Source
    from dtype_engine.core.options import Options
    from dtype_engine.runtime.session.session import Session


def open_model(source: Source, options: Options, emit: Callable[[events.Event], None], read_headers: bool) -> OpenModel:
    """Open `source` as far as possible, and emit the progress and the result. Errors are emitted, too: a model that can't be
    loaded has no session.

    read_headers: whether to first read all headers and emit their tree. False if the caller has it already.
    """
    model = OpenModel(source, options)
    try:
        with foreign_code():
            _open_session(model, emit, read_headers)
    except UserError as error:
        model.why_closed = error.sentence
        classes_follow = (
            isinstance(error, NoForward) and model.checkpoint is not None and model.checkpoint.config is not None
        )
        from dtype_engine.checkpoint.memory_fit import usable_memory  # the first paint does not need it

        emit(events.OpenFailed(error.sentence, classes_follow, usable_memory(options.max_memory)))
        if classes_follow:
            _emit_classes(model, emit)
    except Exception as error:
        model.why_closed = f"{source.title}: opening it failed: {with_type(error)}"
        emit(events.OpenFailed(model.why_closed))
    return model


def refuse_unmatched(source: Source, options: Options, recipe: Recipe) -> None:
    """Raise UserError if a rule of the recipe matches nothing in a checkpoint, before any weight is loaded.

    If the names in the headers don't decide it, the architecture is built, which imports torch. This is for rules that name module
    classes, tied weights or packed experts, which the headers lack.
    """
    checkpoint = source.open() if recipe.rules else None
    if checkpoint is None or not rules_in_doubt(checkpoint.tree(), recipe):
        return
    finish_imports()
    from dtype_engine.runtime.building.describe import describe

    require_matches(describe(source, options).tree, recipe)


def _open_session(model: OpenModel, emit: Callable[[events.Event], None], read_headers: bool) -> None:
    from dtype_engine.core.opening_progress import OpeningProgress  # the first paint does not need it

    started = time.perf_counter()
    with OpeningProgress(lambda *progress: emit(events.LoadingProgress(*progress)), model.source.kind) as on_step:
        session = _opened(model, emit, read_headers, on_step)
    from dtype_engine.checkpoint.memory_fit import usable_memory
    from dtype_engine.runtime.device import total_bytes
    from dtype_engine.runtime.measure.generation import why_no_text
    from dtype_engine.runtime.modes.reference import reference_name

    emit(
        events.ModelReady(
            tree=session.tree,
            class_name=type(session.model.module).__name__,
            device=str(session.model.device),
            seconds=time.perf_counter() - started,
            inputs=session.inputs.description if session.inputs is not None else "none",
            notices=session.model.notices,
            no_forward=session.why_no_forward,
            no_text=why_no_text(session.model.module),
            memory_bytes=total_bytes(session.model.device) or usable_memory(model.options.max_memory),
            provenance=model.provenance,
            reference=reference_name(session.model),
            loader=session.model.loader,
        )
    )
    if (summary := session.inputs_reading) is not None:
        emit(events.InputsReady(summary))
    model.session = session


def _opened(
    model: OpenModel, emit: Callable[[events.Event], None], read_headers: bool, on_step: Callable[[str], None]
) -> Session:
    """Open the model. If `read_headers` is set, the tree of the headers is emitted first. Raises NoForward, UserError."""
    source = model.source
    if source.kind == "checkpoint":
        on_step("reading the headers")
        model.checkpoint = source.open()
        assert model.checkpoint is not None
        if read_headers:
            # The tree may be large, so it is not kept here.
            emit(events.HeadersRead(model.checkpoint.tree(), model.checkpoint.notices, model.provenance))
        from dtype_engine.checkpoint.memory_fit import why_no_pass

        if reason := why_no_pass(model.checkpoint, model.options):
            raise NoForward(f"{source.title}: {reason}")
    on_step("importing torch")
    finish_imports()
    from dtype_engine.runtime.session.opening import open_session

    return open_session(
        source,
        model.options,
        on_step=on_step,
        refused=lambda why: emit(events.InputsRefused(f"{why}. The default inputs are used.")),
    )


def _emit_classes(model: OpenModel, emit: Callable[[events.Event], None]) -> None:
    """Emit the tree of a model that could not be loaded, with module classes and tied weights if its architecture is known."""
    from dtype_engine.runtime.building.describe import describe

    assert model.checkpoint is not None
    emit(events.LoadingProgress("reading the architecture"))
    try:
        tree = describe(model.source, model.options, model.checkpoint).tree
    except UserError:
        tree = model.checkpoint.tree()
    if tree.has_classes:
        model.known_tree = tree
    emit(events.HeadersRead(tree, (), model.provenance))
