"""`dtype-engine sweep`: measures many recipe files on one model."""

from __future__ import annotations

from pathlib import Path

import click

from dtype_engine.cli.options import METRICS, REFERENCE, ModelCommand, json_option
from dtype_engine.cli.parallel import over_workers, workers_option
from dtype_engine.cli.program import NO, answer, note, print_json, print_stderr, say
from dtype_engine.cli.request import RunRequest
from dtype_engine.core.errors import UserError
from dtype_engine.results.as_json import as_json
from dtype_engine.results.drift import SQUARED
from dtype_engine.results.sweep import SweepReport, SweepRow, sweep_rows


@click.command(cls=ModelCommand, rules=False, also=(*REFERENCE, *METRICS))
@click.argument("model")
@click.argument("recipes", nargs=-1, required=True, type=click.Path(path_type=Path))
@workers_option
@json_option
def sweep(request: RunRequest, recipes: tuple[Path, ...], workers: str | int | None, as_object: bool) -> int:
    """Measure many recipe files on one model, and print a table of their bytes and drift. A mark shows the best recipes: those that
    no other recipe beats in both bytes and drift.

    Each recipe is measured with the settings of its file or, if the file has none, with those of the command line.
    """
    from dtype_engine.evaluation.work import drifts
    from dtype_engine.recipe import require_matches
    from dtype_engine.recipe.file import read_recipe_file
    from dtype_engine.search.sensitivity import scalar_drift

    files = [read_recipe_file(path) for path in recipes]
    if len(set(recipes)) < len(recipes):
        raise UserError("a recipe file is named twice")
    source = request.locate()
    session = request.open_session(source)
    sizes = []
    for path, file in zip(recipes, files, strict=True):
        try:
            sizes.append(require_matches(session.tree, file.recipe).planned_bytes)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
    settings = request.options.settings
    wanted = [(file.recipe, file.settings or settings) for file in files]
    rows = []
    with over_workers(workers, session, source, len(wanted), session.tree.stored_bytes) as (over, show):
        for done, (index, report) in enumerate(drifts(session, wanted, over), 1):
            show(done, len(wanted))
            output = report.output
            drift = scalar_drift(output)
            rows.append(SweepRow(str(recipes[index]), report.rules, sizes[index], drift, False, output, report.metrics))
    say("")
    stored, unit = session.tree.stored_bytes, "KL, nats per position" if output.kl_mean is not None else SQUARED
    swept = SweepReport(report.model, report.inputs, stored, unit, sweep_rows(rows))
    finite = any(row.output.is_finite for row in rows)
    if not finite:
        print_stderr("dtype-engine: the output is finite under none of the recipes")
    if as_object:
        print_json(as_json(swept))
        return 0 if finite else NO
    from dtype_engine.reports.text_sweep import sweep_text

    answer(sweep_text(swept))
    note(report.notices)
    return 0 if finite else NO
