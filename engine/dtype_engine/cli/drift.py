"""`dtype-engine drift`, `flow` and `speed`: the commands that run a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
import msgspec

from dtype_engine.cli.conversions import left_out_lines, open_as
from dtype_engine.cli.options import HELD_OUT, LOGITS, MEASURING, REFERENCE, ModelCommand, json_option
from dtype_engine.cli.parallel import over_workers, workers_option
from dtype_engine.cli.program import (
    NO,
    UnwrittenFiles,
    answer,
    note,
    print_json,
    print_stderr,
    say,
    say_count,
    say_progress,
    say_share,
)
from dtype_engine.cli.request import RunRequest
from dtype_engine.cli.thresholds import all_limits, finite_status, threshold_options
from dtype_engine.core.errors import UserError
from dtype_engine.core.text import printable
from dtype_engine.core.user_folders import expanded
from dtype_engine.recipe.targets import SERVING
from dtype_engine.results.as_json import as_json
from dtype_engine.results.attribution import (
    AttributionReport,
    LossRemedy,
    NoiseFloor,
    NonFiniteDiagnosis,
    near_floor,
)
from dtype_engine.results.drift import DriftReport
from dtype_engine.results.given_logits import GivenLogits
from dtype_engine.results.losses import severe
from dtype_engine.results.meaning import HELP, Meaning, meaning
from dtype_engine.results.merge_error import MergeError
from dtype_engine.results.rounding import FittedTo, HeldOut
from dtype_engine.results.runs import Generation
from dtype_engine.results.thresholds import Verdict, verdicts

if TYPE_CHECKING:
    from dtype_engine.checkpoint.source import Source
    from dtype_engine.recipe.served import Served
    from dtype_engine.runtime.session.session import Session

Run = Literal["reference", "candidate"]


@click.command(cls=ModelCommand, also=(*MEASURING, HELD_OUT, *LOGITS), epilog=HELP)
@click.option(
    "--generate",
    "tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help="Also let the reference and the candidate continue each prompt by this number of tokens, greedily, and show the "
    "first token that differs. `dtype-engine tokens` compares every token.",
)
@click.option(
    "-o",
    "--save-recipe",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write a recipe file (YAML) with the rules, the settings of this run and the measured drift and metrics.",
)
@click.option(
    "--report",
    "report_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also write a report of this measurement to a file. The file's extension, .html or .md, determines the format.",
)
@click.option(
    "--save-pictures",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="If the model makes pictures or sounds: write those of the reference and of the candidate for each input to this "
    "folder, as PNG or WAV files.",
)
@click.option(
    "--save",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Save the measurement to this file while it runs. If the file exists, the measurement continues from it.",
)
@click.option(
    "--save-logits",
    type=(click.Choice(["reference", "candidate"]), click.Path(path_type=Path)),
    multiple=True,
    metavar="RUN FILE",
    help="Also write the tokens and the logits of a run to this safetensors file; RUN is reference or candidate. It is run once "
    "more for this. --reference-logits and --against-logits take such a file. May be repeated.",
)
@click.option(
    "--force",
    is_flag=True,
    help="Let --save-recipe, --report, --save-logits and --save-pictures replace files that exist. Without --force, an existing "
    "file is an error.",
)
@click.option(
    "--causes",
    "with_causes",
    is_flag=True,
    help="Also find the modules in which the drift arises: cast each module alone, and measure how far the model's output "
    "drifts.",
)
@click.option(
    "--suggest",
    is_flag=True,
    help="If casts make values of weights infinite or zero: find rules that give these weights dtypes which hold the values, "
    "and measure the drift again with these rules.",
)
@click.option(
    "--held-out-answers",
    is_flag=True,
    help="Measure once more as --held-out does, on text of the model itself: the reference answers the built-in prompts "
    "greedily, by up to 64 tokens each, through the model's chat template if it has one.",
)
@click.option(
    "--positions",
    is_flag=True,
    help="Also print the drift by position in the sequence, which shows whether it grows along a long text. Reports and --json "
    "always have it.",
)
@click.option(
    "--as",
    "runtime",
    type=click.Choice(SERVING),
    help="Measure what this runtime computes with if it quantizes the checkpoint by the recipe while it loads it, as "
    "`dtype-engine recipe convert --to` tells it to: its scales, its one dtype for everything else, and its quantized "
    "activations, unless --quantize-activations is given, too.",
)
@workers_option
@threshold_options
@json_option
def drift(
    request: RunRequest,
    tokens: int | None,
    save_recipe: Path | None,
    report_file: Path | None,
    save_pictures: Path | None,
    save: Path | None,
    save_logits: tuple[tuple[Run, Path], ...],
    force: bool,
    with_causes: bool,
    suggest: bool,
    held_out_answers: bool,
    positions: bool,
    runtime: str | None,
    workers: str | int | None,
    as_object: bool,
    **limits: Any,
) -> int:
    """Run a model twice on the same inputs, as the reference (in float32) and as the candidate (with the casts), and report the
    drift: how far the candidate's output is from the reference's. The memory before and after the casts is reported, too.

    Weights in which the casts made values infinite or zero are listed, however small the drift is.

    The exit status is 1 if a limit (--max-kl, --min-sqnr, --min-top1, --min, --max) is not met, and, with or without limits, if the
    output has NaN or infinite values in the reference or in the candidate.
    """
    thresholds = all_limits(limits, request.options.metrics)
    _refuse_targets(report_file, (save_recipe, report_file, *(file for _, file in save_logits)), force)
    if request.options.reference_bytes is None and not suggest:
        # Nothing is measured a second time, so no outputs need to be kept.
        request = msgspec.structs.replace(request, options=dataclasses.replace(request.options, reference_bytes=0))
    if with_causes and (request.options.against_logits or request.options.reference_logits):
        raise UserError("--causes compares modules, of which a file of outputs has none: leave --causes out")
    if workers is not None and not with_causes:
        raise UserError("drift --workers goes with --causes: one recipe is measured in one process")
    if held_out_answers and request.options.held_out:
        raise UserError("--held-out-answers and --held-out exclude each other: there is one held-out text")
    source = request.locate()
    session, served = open_as(request, source, runtime)
    _refuse_before_measuring(session, tokens, save_pictures, force)
    answers = session.own_answers(on_progress=partial(say_share, "writing answers")) if held_out_answers else None
    unwritten = UnwrittenFiles()
    report = _measured(session, save, unwritten)
    if save_recipe is not None:
        from dtype_engine.core.atomic_write import write_text_atomic
        from dtype_engine.recipe.provenance import recipe_text
        from dtype_engine.reports.versions import versions

        recipe = recipe_text(
            session.tree, session.plan, session.model.title, session.settings, report, versions(),
            fitted_to=session.fitted_to,
        )  # fmt: skip
        with unwritten.reported():
            write_text_atomic(save_recipe, recipe, replace=force)
    if save_pictures is not None:
        from dtype_engine.runtime.session import saved_pictures

        with unwritten.reported():
            note(tuple(f"{file} is written" for file in saved_pictures.save_pictures(session, save_pictures, force)))
    for run, file in save_logits:
        with unwritten.reported():
            note((f"{session.save_logits(file, run, force, say_progress)} is written",))
    texts: tuple[Generation, ...] = ()
    if tokens:
        texts = session.generate(tokens, lambda which, done, most: say_share(f"generating: {which}", done, most))
    reached = verdicts(thresholds, report.output, report.metrics)
    attribution = _causes(session, source, workers) if with_causes else None
    held_out = None
    if answers is not None or request.options.held_out:
        held_out = session.held_out(answers, partial(say_share, "held-out inputs"))
    details = dataclasses.replace(_measure_details(session, report, attribution, suggest, held_out), served=served)
    if report_file is not None:
        from dtype_engine.cli.report import of_session, write_report
        from dtype_engine.reports.document import Measured

        measured = Measured(report, nonfinite=details.nonfinite)
        with unwritten.reported():
            write_report(report_file, force, source, of_session(session), measured)
    say("")
    if as_object:
        calibration = {"calibration": as_json(session.inputs_reading)}
        generated = {"generated": [_generation(text) for text in texts]} if tokens else {}
        print_json(
            as_json(report) | calibration | generated | details.as_json(report) | {"thresholds": as_json(reached)}
        )
        return _exit_status(reached, report, unwritten)
    from dtype_engine.reports.text import drift_text, generation_text

    answer(drift_text(report, positions))
    answer(details.text(report, reached))
    for text in texts:
        answer(generation_text(text))
    for line in left_out_lines(served.conversion) if served is not None else ():
        print_stderr(f"dtype-engine: {line}")
    note((*report.notices, *([held_out.sentence] if held_out is not None and held_out.sentence else [])))
    return _exit_status(reached, report, unwritten)


@dataclass(frozen=True, slots=True)
class _Details:
    """Results that `dtype-engine drift` prints after the `DriftReport`. A field is None if it was not measured, or if nothing was
    found.
    """

    floor: NoiseFloor | None
    candidate_floor: NoiseFloor | None
    nonfinite: NonFiniteDiagnosis | None
    causes: AttributionReport | None
    meaning: Meaning
    with_remedy: bool
    """Whether --suggest was given. If True, a `remedy` of None means that no cast makes values infinite or zero."""
    remedy: LossRemedy | None
    fitted_to: FittedTo | None
    """The inputs to which the recipe's roundings are fitted."""
    held_out: HeldOut | None
    logits: GivenLogits | None
    """The file with the outputs of the reference or of the candidate."""
    merge: MergeError | None
    served: Served | None = None
    """How the runtime serves the recipe as which --as measures it."""

    def as_json(self, report: DriftReport) -> dict[str, Any]:
        keys = {"floor": as_json(self.floor), "under_floor": self.meaning.word == "under the floor"}
        if (kernels := self.candidate_floor) is not None:
            keys |= {"candidate_floor": as_json(kernels), "within_kernels": kernels.explains(report.output)}
        keys |= {"meaning": as_json(self.meaning), "nonfinite": as_json(self.nonfinite)}
        keys |= {"suggest": as_json(self.remedy)} if self.with_remedy else {}
        keys |= {"fitted_to": as_json(self.fitted_to)} if self.fitted_to is not None else {}
        keys |= {"held_out": as_json(self.held_out) | {"lost": self.held_out.lost}} if self.held_out is not None else {}
        keys |= {"merge": as_json(self.merge)} if self.merge is not None else {}
        keys |= {"logits": as_json(self.logits)} if self.logits is not None else {}
        keys |= {"served": as_json(self.served)} if self.served is not None else {}
        return keys | ({"causes": as_json(self.causes)} if self.causes is not None else {})

    def text(self, report: DriftReport, reached: Sequence[Verdict]) -> str:
        from dtype_engine.reports.text_drift import (
            causes_text,
            floor_lines,
            held_out_lines,
            kernel_lines,
            nonfinite_lines,
        )
        from dtype_engine.reports.text_losses import remedy_lines, suggestion

        lines = floor_lines(self.floor, report.output, report.modules)
        lines += kernel_lines(self.candidate_floor, report.output)
        lines += [f"merge      {self.merge}"] if self.merge is not None else []
        lines += held_out_lines(self.held_out) if self.held_out is not None else []
        lines += nonfinite_lines(self.nonfinite) if self.nonfinite is not None else []
        found = self.nonfinite and self.nonfinite.remedy
        if self.with_remedy and self.remedy is None and found:
            lines.append(suggestion(found))
        elif self.with_remedy:
            lines += remedy_lines(self.remedy)
        elif severe(report.lost or ()):
            lines.append("           --suggest finds rules that keep the values which the casts lose")
        lines += [causes_text(self.causes)] if self.causes is not None else []
        lines += [f"{'pass' if verdict.passed else 'FAIL'}       {verdict}" for verdict in reached]
        return "\n".join(lines)


def _causes(session: Session, source: Source, workers: str | int | None) -> AttributionReport:
    if workers is None:
        return session.causes(partial(say_count, "causes"))
    from dtype_engine.evaluation import work

    with over_workers(workers, session, source, len(session.model.weights), session.plan.planned_bytes) as (over, show):
        assert over is not None
        return work.causes(session, over, show)


def _measure_details(
    session: Session,
    report: DriftReport,
    attribution: AttributionReport | None,
    suggest: bool,
    held_out: HeldOut | None,
) -> _Details:
    option, given = session.options.floor, session.given_logits
    floor, of_file = None, given is not None and given.run == "reference"  # a file's floor is not known
    if not of_file and (option == "always" or (option == "auto" and near_floor(report.output))):
        floor = session.floor(partial(say_share, "measuring the noise floor"))
    kernels = None
    if session.wants_candidate_floor(report.output):
        kernels = session.candidate_floor(partial(say_share, "measuring other kernels"))
    nonfinite = session.nonfinite(report, partial(say_share, "trying remedies"))
    remedy = session.loss_remedy(report, partial(say_share, "trying what keeps the values")) if suggest else None
    meant = meaning(report.output, floor, report.modules)
    fitted = session.fitted_to
    merge = session.merge_error(partial(say_share, "reading the weights of the merge"))
    return _Details(floor, kernels, nonfinite, attribution, meant, suggest, remedy, fitted, held_out, given, merge)


def _refuse_targets(report: Path | None, files: Sequence[Path | None], force: bool) -> None:
    from dtype_engine.core.atomic_write import check_target

    if report is not None:
        from dtype_engine.reports.render import check_name

        check_name(report)
    for file in files:
        if file is not None:
            check_target(file, force)


def _measured(session: Session, save: Path | None, unwritten: UnwrittenFiles) -> DriftReport:
    """Return the measured drift, also if it can't be saved in the file `save`. If the user interrupts the measurement, say how to
    continue it from this file.
    """
    from dtype_engine.runtime.measure.listener import MeasurementListener

    try:
        return session.drift(MeasurementListener(on_progress=say_progress, on_unsaved=unwritten.add), save=save)
    except KeyboardInterrupt:
        if save is not None and not unwritten.status and expanded(save).exists():
            print_stderr(
                f"{printable(str(save), 200)} has the finished sequences; run the same command again to continue"
            )
        raise


def _refuse_before_measuring(session: Session, tokens: int | None, pictures: Path | None, force: bool) -> None:
    """Raise UserError before the measurement, which may take hours, if --generate or --save-pictures can't be done after it."""
    from dtype_engine.runtime.measure.generation import refuse_tokens, why_no_text
    from dtype_engine.runtime.session.saved_pictures import check_pictures

    if tokens:
        if reason := why_no_text(session.model.module):
            raise UserError(reason)
        refuse_tokens(session.model, tokens, session.options.limits)
    if pictures is not None:
        check_pictures(session, pictures, force)


def _exit_status(reached: Sequence[Verdict], report: DriftReport, unwritten: UnwrittenFiles) -> int:
    """Return the exit status. Prints on standard error each limit that was not met, and a line if the output is not finite."""
    missed = [verdict for verdict in reached if not verdict.passed]
    for verdict in missed:
        option = "--" + (verdict.name if " " in verdict.name else verdict.name.replace("_", "-"))
        print_stderr(f"dtype-engine: {option} is missed: {verdict}")
    status = finite_status(report) or (NO if missed else 0)
    return unwritten.status or status


def _generation(text: Generation) -> dict[str, Any]:
    return {
        "prompt": text.prompt,
        "reference": as_json(text.reference) | {"text": text.reference.text},
        "candidate": as_json(text.candidate) | {"text": text.candidate.text},
        "first_difference": text.same_tokens if text.differs else None,
    }


@click.command(cls=ModelCommand, also=REFERENCE)
@json_option
def flow(request: RunRequest, as_object: bool) -> None:
    """List the implicit casts of one forward pass: the operations in which torch changes a dtype by itself, without a call such as
    `.to` in the model's code. Each line has the module, the operation, the dtype before and after, and the number of elements.
    """
    session = request.open_session()
    casts = session.flow()
    if as_object:
        rules = [str(rule) for rule in session.recipe.rules]
        print_json({"model": session.model.title, "rules": rules, "casts": as_json(casts)})
        return
    from dtype_engine.reports.text import flow_text

    answer(flow_text(casts))


@click.command(cls=ModelCommand)
@click.option(
    "--repeats",
    type=click.IntRange(min=3),
    default=5,
    show_default=True,
    help="How many forward passes are timed for each version of the model (float32, stored dtypes, recipe's dtypes), after a "
    "warm-up.",
)
@json_option
def speed(request: RunRequest, repeats: int, as_object: bool) -> None:
    """Measure how long forward passes take in float32, in the stored dtypes and in the recipe's dtypes. Each time is the median of
    several passes after a warm-up.
    """
    session = request.open_session()
    report = session.speed(lambda what, done, total: say_share(f"timing: {what}", done, total), repeats=repeats)
    say("")
    if as_object:
        print_json(as_json(report))
        return
    from dtype_engine.reports.text import speed_text

    answer(speed_text(report))
    note(report.notices)
