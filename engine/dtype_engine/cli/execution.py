"""`dtype-engine check-execution`: whether outputs depend on how the model is executed."""

from __future__ import annotations

from functools import partial
from typing import Any

import click
import msgspec

from dtype_engine.cli.options import ModelCommand, json_option
from dtype_engine.cli.program import NO, answer, note, print_json, print_stderr, say_count
from dtype_engine.cli.request import RunRequest
from dtype_engine.cli.thresholds import all_limits, threshold_options
from dtype_engine.core.execution import parse_execution
from dtype_engine.core.text import printable
from dtype_engine.results.as_json import as_json
from dtype_engine.results.execution import ExecutionRow
from dtype_engine.results.thresholds import Limit, Verdict, verdicts


@click.command(cls=ModelCommand)
@click.option(
    "--execution",
    "given",
    multiple=True,
    metavar="KEY=VALUE,...",
    help="An execution to compare, with the axes of --candidate, as in batch=8,padding=left; may be repeated. By default: another "
    "attention implementation, torch's math kernel, batches, decoding, and on the CPU other threads and no oneDNN.",
)
@threshold_options
@json_option
def check_execution(request: RunRequest, given: tuple[str, ...], as_object: bool, **limits: Any) -> None:
    """Compare executions of the same weights: how far the outputs move under another attention kernel, batch, padding or decoding,
    and in which module first. All runs have the dtypes of the rules. With a limit such as --max-kl, the exit status is 1 if an
    execution does not meet it.
    """
    wanted = [parse_execution(text.split(",")) for text in given]
    limited = all_limits(limits, ())
    session = request.open_session()
    report = session.executions(wanted, partial(say_count, "executions"))
    reached = [_verdicts(row, limited) for row in report.rows]
    if as_object:
        rows = [as_json(row) | {"thresholds": as_json(each)} for row, each in zip(report.rows, reached, strict=True)]
        print_json(msgspec.to_builtins(as_json(report)) | {"rows": rows})
    else:
        from dtype_engine.reports.text_execution import execution_text

        answer(execution_text(report, reached))
    note(session.model.notices)
    missed = [
        (row, verdict) for row, each in zip(report.rows, reached, strict=True) for verdict in each if not verdict.passed
    ]
    for row, verdict in missed:
        print_stderr(f"dtype-engine: {printable(row.execution)}: {verdict}")
    if missed:
        click.get_current_context().exit(NO)


def _verdicts(row: ExecutionRow, limits: tuple[Limit, ...]) -> tuple[Verdict, ...]:
    return verdicts(limits, row.output) if row.output is not None else ()
