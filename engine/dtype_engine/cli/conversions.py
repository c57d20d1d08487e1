"""What commands say about a recipe in the form of another tool, and how they open a model as a runtime would serve it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import msgspec

from dtype_engine.cli.request import RunRequest
from dtype_engine.core import dtypes
from dtype_engine.core.text import printable
from dtype_engine.recipe import Recipe, require_matches
from dtype_engine.recipe.targets import Conversion

if TYPE_CHECKING:
    from dtype_engine.checkpoint.source import Source
    from dtype_engine.recipe.served import Served
    from dtype_engine.runtime.session.session import Session

_SHOWN = 4


def some_names(names: tuple[str, ...]) -> str:
    """Return the first of some names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(printable, names[:_SHOWN])) + more


def left_out_lines(written: Conversion) -> list[str]:
    """Return lines with the notes of a conversion, and with what it leaves out or gives other scales."""
    lines = [f"note: {note}" for note in written.notes]
    for entry in written.left_out:
        what = "left out" if entry.part == "dtype" else "other scales"
        lines.append(
            f"{what}: {some_names(entry.tensors)}: {entry.why}; planned {dtypes.short_name(entry.planned)}, "
            f"gets {dtypes.short_name(entry.instead)}"
        )
    return lines


def open_as(request: RunRequest, source: Source, runtime: str | None) -> tuple[Session, Served | None]:
    """Open the model of a request, cast by its rules or, with the name of a runtime, as that would serve them. Then also returns
    what it serves. Raises UserError.
    """
    if runtime is None:
        return request.open_session(source), None
    from dtype_engine.service.opening import refuse_unmatched

    refuse_unmatched(source, request.options, request.recipe)
    session = msgspec.structs.replace(request, recipe=Recipe(), preset=None).open_session(source)
    recipe = request.with_preset(session.tree)
    require_matches(session.tree, recipe)
    served = session.served_by(runtime, recipe)
    session.apply(served.recipe)
    if "quantize_activations" not in request.explicit:
        rounds = served.quantize_activations
        session.settings = dataclasses.replace(session.settings, quantize_activations=rounds)
    return session, served
