"""`dtype-engine check`: checks a checkpoint for errors without loading it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from dtype_engine.cli.model_card import checked_card, refuse_unused
from dtype_engine.cli.options import OF_CARD, ModelCommand, json_option, sarif_option
from dtype_engine.cli.program import BAD_INPUT, NO, answer, note, print_json, print_stderr, say, say_share
from dtype_engine.cli.request import RunRequest
from dtype_engine.core.errors import UserError

_MOST_TENSORS = 10_000
"""By default, a checkpoint with more tensors is not compared with its architecture, because this comparison imports torch."""


@click.command(cls=ModelCommand, rules=False, runs=False, also=OF_CARD)
@click.option(
    "--against",
    metavar="SOURCE",
    help="Also compare MODEL's tensor names and shapes with those of SOURCE, the checkpoint from which MODEL was made. For an "
    "adapter, name its base model.",
)
@click.option(
    "--values",
    is_flag=True,
    help="Also read the values of all tensors, and report NaN, infinities, and matrices whose elements are all the same.",
)
@click.option(
    "--modules/--no-modules",
    default=None,
    help="Also compare MODEL's tensor names with those that its architecture has. This imports torch, which takes seconds.  "
    "[default: only if there are at most 10,000 tensors]",
)
@click.option(
    "--card",
    type=click.Path(path_type=Path),
    metavar="README",
    help="Also repeat the measurement of the model card in this file (or in the README.md of this folder), and report the figures "
    "that do not hold. Of an export, --against names the model that it was made from.",
)
@sarif_option
@json_option
def check(
    request: RunRequest,
    against: str | None,
    values: bool,
    modules: bool | None,
    card: Path | None,
    as_sarif: bool,
    as_object: bool,
) -> int:
    """Check a checkpoint for errors without loading it. Errors are missing tensors, tensors with another shape than config.json
    gives them, quantized weights whose codes or scales are missing or have a wrong shape, invalid scales such as NaN, and different
    dtypes in layers that belong together, such as q, k and v.

    Only headers and scales are read, unless --values or --card is given. The exit status is 1 if an error is found.
    """
    from dtype_engine.checkpoint.check import check as look
    from dtype_engine.checkpoint.source import locate_by
    from dtype_engine.checkpoint.weight_files import ADAPTER_CONFIG
    from dtype_engine.core.gc_pause import gc_paused
    from dtype_engine.results.check import Finding

    if as_sarif and as_object:
        raise UserError("--sarif and --json are two forms of one answer: give one of them")
    if card is None:
        refuse_unused(request)
    source = request.locate()
    with gc_paused():
        unfit: tuple[Finding, ...] = ()
        try:
            checkpoint = source.open(absent_shards=True)
        except UserError as error:
            if source.base is not None:
                checkpoint, against = source.without_base().open(), against or str(source.base.path)
                unfit = (Finding("adapter", ADAPTER_CONFIG, error.sentence, ADAPTER_CONFIG),)
            elif not as_sarif or source.path is None or source.hub is not None:
                raise
            else:
                return _unreadable(source.path, error)
        if checkpoint is None:
            raise UserError(
                f"{source.title} {source.no_headers}: check reads checkpoints, so name the file of its weights"
            )
        other = locate_by(against, request.options) if against is not None else None
        of_source = other.open() if other is not None else None
        if other is not None and of_source is None:
            raise UserError(f"--against {other.title} is code: name a checkpoint")

        def on_progress(what: str, done: int, total: int) -> None:
            say_share(f"reading {what}", done, total)

        title = other.title if other is not None else ""
        report = look(checkpoint, source.title, of_source, title, values, on_progress)
        report = replace(report, findings=report.findings or unfit)
    if modules if modules is not None else len(checkpoint.tensors) <= _MOST_TENSORS:
        from dtype_engine.runtime.building.describe import with_architecture

        report = with_architecture(report, source, request.options, checkpoint)
    else:
        unchecked = "the architecture: dtype-engine check --modules compares it, which imports torch"
        report = replace(report, unchecked=(*report.unchecked, unchecked))
    if card is not None:
        report = checked_card(report, request, source, other, card)
    say("")
    from dtype_engine.reports.text_check import check_json, check_sarif, check_text

    if as_sarif or as_object:
        print_json(check_sarif(report, checkpoint) if as_sarif else check_json(report))
    else:
        answer(check_text(report))
    note(checkpoint.remarks)
    return NO if report.findings else 0


def _unreadable(path: Path, error: UserError) -> int:
    """Print why a model can't be read as SARIF, as a result of the file that describes its weights, and return the exit status."""
    from dtype_engine.checkpoint.weight_files import described_by
    from dtype_engine.reports.sarif import failure

    sentence = " ".join(str(error).split())
    print_json(failure(sentence, "check", described_by(path)))
    print_stderr(f"dtype-engine: {sentence}")
    return BAD_INPUT
