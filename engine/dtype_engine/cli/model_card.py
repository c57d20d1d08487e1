"""Model cards on the command line: `dtype-engine report --model-card` writes one, `dtype-engine check --card` measures it again."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dtype_engine.cli.options import OF_CARD
from dtype_engine.cli.program import UnwrittenFiles, answer, note, print_json, say, say_progress, say_share
from dtype_engine.cli.request import RunRequest
from dtype_engine.core.errors import UserError
from dtype_engine.core.text import printable
from dtype_engine.results.as_json import as_json
from dtype_engine.results.check import CheckReport, Finding

if TYPE_CHECKING:
    from dtype_engine.checkpoint.source import Source


def write_card(request: RunRequest, file: Path, into: Path | None, force: bool, as_object: bool) -> int:
    """Measure the recipe of a request, write its model card to `file`, and return the exit status. into: a README whose text the
    file gets, too, or None. Raises UserError.
    """
    from dtype_engine.core.atomic_write import check_target, write_text_atomic
    from dtype_engine.reports.model_card import read_card, read_readme, refuse_unreadable
    from dtype_engine.runtime.measure.listener import MeasurementListener
    from dtype_engine.runtime.session.model_card import need_files

    if file.suffix.lower() != ".md":
        raise UserError(f"{printable(str(file), 200)}: a model card is Markdown, so name a file that ends in .md")
    if request.options.metrics:
        raise UserError(
            "--model-card has no figures of --metric and --eval, which a reader can't repeat: leave them out"
        )
    check_target(file, force)
    readme = ""
    if into is not None:
        into, readme = read_readme(into)
        refuse_unreadable(readme, printable(str(into), 200))
    source = request.locate()
    need_files(source)
    session = request.open_session(source)
    report = session.drift(MeasurementListener(on_progress=say_progress))
    text = session.model_card(report, readme, partial(say_share, "reading the weights"))
    unwritten, written = UnwrittenFiles(), None
    with unwritten.reported():
        written = write_text_atomic(file, text, replace=force)
    say("")
    if as_object:
        figures = {figure.name: as_json(figure) for figure in read_card(text, str(file)).figures}
        named = {"file": str(written) if written else None, "model": session.model.title}
        print_json({**named, "figures": figures})
    else:
        answer(f"wrote {printable(str(written), 1000)}" if written else text)
    note(report.notices)
    return unwritten.status


def refuse_unused(request: RunRequest) -> None:
    """Raise UserError for an option that is only for a card, if the user named no card."""
    for option in OF_CARD:
        if option.name in request.explicit:
            raise UserError(f"check {option.opts[0]} goes with --card, without which no model is run")


def checked_card(
    report: CheckReport, request: RunRequest, source: Source, against: Source | None, file: Path
) -> CheckReport:
    """Return the report of a check with what a repeated measurement says about the model card in `file`. Raises UserError, also if
    there is no card in it, or if the model or the inputs are not the card's.
    """
    from dtype_engine.reports.model_card import metadata_differences, read_card, read_readme
    from dtype_engine.runtime.session.repeated_card import how_to_repeat, repeat_card

    file, readme = read_readme(file)
    where = printable(str(file), 200)
    card = read_card(readme, where)
    differences = metadata_differences(readme, where, card)
    repeat = how_to_repeat(card, source, against, request.options, partial(say_share, "reading the weights"))
    wanted = msgspec.structs.replace(request, options=repeat.options, recipe=repeat.recipe)
    found = repeat_card(wanted.open_session(source), card, where, repeat.reference_bytes, say_progress)
    findings = []
    if not repeat.is_same:
        findings.append(Finding("card-weights", source.title, "has other weights than the card's", str(file)))
    for each in found.figures:
        if not each.holds:
            now = "is not measured" if each.now is None else f"is {each.now.text} measured again"
            findings.append(Finding("card-figure", each.name, f"is {each.card.text} on the card and {now}", str(file)))
    findings += [Finding("card-metadata", name, what, str(file)) for name, what in differences]
    return dataclasses.replace(report, findings=(*report.findings, *findings), card=found)
