"""`dtype-engine report`: measures a recipe on a model, and writes everything that is known about it to one file."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dtype_engine.cli.options import METRICS, REFERENCE, ModelCommand, force_option, json_option
from dtype_engine.cli.program import UnwrittenFiles, answer, note, print_json, say, say_progress, say_share
from dtype_engine.cli.request import Planned, RunRequest
from dtype_engine.cli.thresholds import finite_status
from dtype_engine.core.errors import NoForward, UserError
from dtype_engine.core.text import printable
from dtype_engine.reports.text_losses import loss_notice
from dtype_engine.results.as_json import as_json
from dtype_engine.results.losses import ValueLoss

if TYPE_CHECKING:
    from dtype_engine.checkpoint.source import Source
    from dtype_engine.core.options import RunSettings
    from dtype_engine.core.tree import Tree
    from dtype_engine.recipe import Plan
    from dtype_engine.reports.document import Measured
    from dtype_engine.runtime.session.session import Session

    _Subject = tuple[Tree, Plan, str, RunSettings]


@click.command(cls=ModelCommand, also=(*REFERENCE, *METRICS))
@click.option(
    "-o",
    "--output",
    "file",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The report file to write. Its extension, .html or .md, determines the format.",
)
@click.option(
    "--speed",
    "with_speed",
    is_flag=True,
    help="Also time forward passes, as the command `dtype-engine speed` does, and put the times into the report.",
)
@click.option(
    "--model-card",
    is_flag=True,
    help="Write a model card instead, as a README.md: the drift with its standard errors, and all that is needed to measure it "
    "again with `dtype-engine check --card`.",
)
@click.option(
    "--into",
    type=click.Path(path_type=Path),
    metavar="README",
    help="With --model-card: the file gets the text of this README, with the card in place of its earlier card or at its end.",
)
@force_option
@json_option
def report(
    request: RunRequest,
    file: Path,
    with_speed: bool,
    model_card: bool,
    into: Path | None,
    force: bool,
    as_object: bool,
) -> int:
    """Measure a recipe, and write a report of it to one file: its rules, the memory, the drift, a table of all modules, and how the
    drift was measured.

    The file is self-contained: it includes its plots, downloads nothing and runs no scripts. If the model can't be run, the report
    says why, and contains everything but the drift.
    """
    if into is not None and not model_card:
        raise UserError("--into goes with --model-card: a report is a file of its own")
    if model_card:
        from dtype_engine.cli.model_card import write_card

        if with_speed:
            raise UserError("--model-card has no times, which depend on the machine: leave --speed out")
        return write_card(request, file, into, force, as_object)
    from dtype_engine.core.atomic_write import check_target
    from dtype_engine.reports.document import Measured
    from dtype_engine.reports.render import check_name
    from dtype_engine.runtime.measure.listener import MeasurementListener

    check_name(file)
    check_target(file, force)
    source = request.locate()
    measured, nonfinite, speed, reason = None, None, None, ""
    lost: tuple[ValueLoss, ...] | None
    try:
        session = request.open_session(source)
        lost = session.lost_values()
        subject = of_session(session)
        try:
            measured = session.drift(MeasurementListener(on_progress=say_progress))
            nonfinite = session.nonfinite(measured)
            if with_speed:
                speed = session.speed(lambda what, done, total: say_share(f"timing: {what}", done, total))
        except NoForward as error:
            reason = str(error)
    except NoForward as error:
        known = request.plan(source)
        subject = known.tree, known.plan, source.title, request.options.settings
        reason = str(error)
        lost = _losses(known)
    say("")
    found = Measured(measured, reason, lost, nonfinite, speed)
    unwritten = UnwrittenFiles()
    written = None
    with unwritten.reported():
        written = write_report(file, force, source, subject, found)
    status = unwritten.status or (finite_status(measured) if measured is not None else 0)
    if as_object:
        _, plan, title, _ = subject
        sizes = {"stored_bytes": plan.stored_bytes, "planned_bytes": plan.planned_bytes}
        why = {"no_drift": reason} if reason else {}
        named = {"file": str(written) if written else None, "model": title, "measured": measured is not None}
        why |= {} if written else {"drift": as_json(measured), "speed": as_json(speed)}
        print_json(named | sizes | why | {"lost": as_json(lost)})
        return status
    if text := f"wrote {printable(str(written), 1000)}" if written else _as_text(found):
        answer(text)
    if notice := loss_notice(lost or ()):
        note([notice])
    if reason:
        note([f"without drift: {reason}"])
    return status


def of_session(session: Session) -> _Subject:
    """Return the subject of a report: (the model's tree, its plan, its title, the run settings)."""
    return session.tree, session.plan, session.model.title, session.settings


def write_report(file: Path, force: bool, source: Source, subject: _Subject, measured: Measured) -> Path:
    """Write a report to a file, and return its path. Raises UserError."""
    from dtype_engine.core.atomic_write import write_text_atomic
    from dtype_engine.reports.document import build_report
    from dtype_engine.reports.render import render
    from dtype_engine.reports.versions import versions

    checkpoint = source.open()
    provenance = checkpoint.provenance.lines() if checkpoint is not None else ()
    made = build_report(*subject, measured, versions(), provenance)
    return write_text_atomic(file, render(made, file), replace=force)


def _as_text(found: Measured) -> str:
    """Return as text what was measured for a report that can't be written."""
    from dtype_engine.reports.text import drift_text, speed_text

    drift = [drift_text(found.drift)] if found.drift is not None else []
    return "\n".join(drift + ([speed_text(found.speed)] if found.speed is not None else []))


def _losses(known: Planned) -> tuple[ValueLoss, ...] | None:
    """Return how many values of each tensor the planned casts lose, or None if there are no files or they can't be read."""
    if known.checkpoint is None:
        return None
    from dtype_engine.runtime.measure.planned_casts import losses_in_files

    on_progress = partial(say_share, "looking for values that the casts lose")
    try:
        return losses_in_files(known.checkpoint, known.tree, known.plan.dtypes, on_progress=on_progress)
    except UserError:
        return None
