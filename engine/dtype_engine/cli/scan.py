"""`dtype-engine scan` and `dtype-engine search`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dtype_engine.cli.options import ModelCommand, RenamedOption, force_option, json_option
from dtype_engine.cli.program import note, print_json, say
from dtype_engine.cli.request import RunRequest
from dtype_engine.core.errors import OutOfReach, UserError
from dtype_engine.recipe import Recipe, Rule
from dtype_engine.results.as_json import as_json
from dtype_engine.results.scan import ScanReport
from dtype_engine.search.constraints import parse_allowed, parse_bytes, parse_dtypes

if TYPE_CHECKING:
    from dtype_engine.runtime.session import Session

NO = 1
Function = TypeVar("Function", bound=Callable[..., Any])


def scan_options(function: Function) -> Function:
    """Add the options of `_scanned` to a command's function."""
    for option in (
        click.option(
            "--save",
            type=click.Path(path_type=Path),
            help="Keep the scan in this file after every sequence, and go on from it.",
        ),
        click.option("--exact", is_flag=True, help="Measure each weight in each dtype alone, one pass each."),
        click.option(
            "--draws",
            type=click.IntRange(min=1),
            help="Backward passes a sequence.  [default: 24 over all, at least 4]",
        ),
        click.option(
            "--dtypes",
            "dtype_names",
            metavar="DTYPE,...",
            help="What to cast to.  [default: bf16,fp16,fp8,fp8e5,int8]",
        ),
    ):
        function = option(function)
    return function


@click.command(cls=ModelCommand, rules=False)
@scan_options
@json_option
def scan(request: RunRequest, as_object: bool, **how: Any) -> None:
    """How much every weight matters in every dtype, in the time of a few forward passes."""
    _, report = _scanned(request, **how)
    if as_object:
        print_json(as_json(report))
        return
    from dtype_engine.reports.text_scan import scan_text

    click.echo(scan_text(report))
    note(report.notices)


@click.command(cls=ModelCommand, rules=False)
@click.option("--budget", metavar="SIZE", help="The most bytes there may be: 12GiB, 500MB, or 45% of those stored.")
@click.option(
    "--max-predicted",
    "--max-kl",
    "--max-drift",
    cls=RenamedOption,
    type=float,
    metavar="DRIFT",
    help="The most predicted drift there may be, in the unit of the scan.",
)
@click.option("--keep", multiple=True, metavar="PATTERN", help="Stays as stored; may be repeated.")
@click.option(
    "--group",
    "--together",
    "groups",
    cls=RenamedOption,
    multiple=True,
    metavar="PATTERN",
    help="One dtype for what it takes in one parent, as '*.{q,k,v}_proj'; may be repeated.",
)
@click.option(
    "--only",
    multiple=True,
    metavar="PATTERN=DTYPE,...",
    help="The dtypes allowed for what a pattern takes; may be repeated, the last that matches decides.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the recipe to this file.")
@force_option
@click.option("--measure/--no-measure", default=True, show_default=True, help="Measure what was found.")
@scan_options
@json_option
def search(
    request: RunRequest,
    budget: str | None,
    max_predicted: float | None,
    keep: tuple[str, ...],
    groups: tuple[str, ...],
    only: tuple[str, ...],
    output: Path | None,
    force: bool,
    measure: bool,
    as_object: bool,
    **how: Any,
) -> int:
    """The best recipe for a budget, by a scan; predicted drift beside measured."""
    from dtype_engine.core.atomic_write import check_target, write_text_atomic
    from dtype_engine.search.pareto import Constraints

    if output is not None:
        check_target(output, force)
    if (budget is None) == (max_predicted is None):
        raise UserError("give either --budget or --max-predicted")
    if budget is not None:
        parse_bytes(budget, 0)
    rules = [parse_allowed(text) for text in only]
    session, _ = _scanned(request, **how)
    most = parse_bytes(budget, session.tree.stored_bytes) if budget is not None else None
    try:
        report = session.search(most, max_predicted, Constraints(keep, groups, (), tuple(rules)), measure)
    except OutOfReach as error:
        if as_object:
            print_json({"model": session.model.title, "met": False, "reason": str(error)})
        click.echo(f"dtype-engine: {error}", err=True)
        return NO
    if output is not None:
        from dtype_engine.recipe.file import write_recipe

        text = write_recipe(Recipe.of(map(Rule.parse, report.rules)), report.model, lost=report.lost)
        write_text_atomic(output, text, replace=force)
    if as_object:
        print_json(as_json(report) | {"met": True})
    else:
        from dtype_engine.reports.text_scan import search_text

        click.echo(search_text(report))
    note(report.notices)
    return 0


def _scanned(
    request: RunRequest, dtype_names: str | None, draws: int | None, exact: bool, save: Path | None
) -> tuple[Session, ScanReport]:
    """A session, scanned."""
    asked = parse_dtypes(dtype_names) if dtype_names is not None else None
    session = request.open_session()
    from dtype_engine.runtime.scan.scan import DEFAULT_DTYPES

    def progress(what: str, done: int, total: int | None) -> None:
        say(f"{what}: {done}" + (f" of {total}" if total else ""))

    report = session.scan(asked or DEFAULT_DTYPES, draws, exact, save, progress)
    say("")
    return session, report
