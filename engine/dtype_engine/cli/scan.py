"""`dtype-engine scan` scores the effect of casting each weight, and `dtype-engine search` finds the best recipe by these scores."""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dtype_engine.cli.options import (
    METRICS,
    REFERENCE,
    ModelCommand,
    bandwidth_option,
    force_option,
    json_option,
    with_options,
)
from dtype_engine.cli.parallel import over_workers, workers_option
from dtype_engine.cli.program import NO, UnwrittenFiles, answer, note, print_json, print_stderr, say, say_count
from dtype_engine.cli.request import RunRequest
from dtype_engine.cli.thresholds import min_and_max_limits, min_and_max_options
from dtype_engine.core.errors import OutOfReach, UserError
from dtype_engine.core.hints import ON_THE_COMMAND_LINE, fill_hints
from dtype_engine.core.input_args import check_files
from dtype_engine.core.kv_formats import SCANNED
from dtype_engine.core.shard import Shard
from dtype_engine.recipe import Recipe, Rule
from dtype_engine.results.as_json import as_json
from dtype_engine.results.expert_tokens import few_words
from dtype_engine.results.scan import MOST_DRAWS
from dtype_engine.search.constraints import parse_allowed, parse_bytes, parse_dtypes
from dtype_engine.search.families import FAMILIES, loaded_scores, require_loadable

if TYPE_CHECKING:
    from dtype_engine.core.tree import Tree
    from dtype_engine.results.scan import ScanReport, SearchReport
    from dtype_engine.results.thresholds import Limit
    from dtype_engine.runtime.scan.last_scan import ScanTask
    from dtype_engine.runtime.session.session import Session
    from dtype_engine.search.pareto import Constraints, SizeKind


@dataclass(frozen=True, slots=True)
class _Scanning:
    """The values of the options in `_scan_options`."""

    family: str | None
    dtype_names: str | None
    draws: int | None
    exact: bool
    save: Path | None
    workers: str | int | None


_scan_options = with_options(
    click.option(
        "--formats",
        "family",
        type=click.Choice(tuple(FAMILIES)),
        help="The program that is to load the model. It decides which dtypes are scored if --dtypes is left out, and a search "
        "gives each weight only dtypes in which the program loads it; own stands for this program, which loads all.  "
        "[default: transformers, or own for a model that transformers does not load]",
    ),
    click.option(
        "--dtypes",
        "dtype_names",
        metavar="DTYPE,...",
        help="The dtypes in which each weight is scored, separated by commas. Dtypes for KV caches begin with kv:, as in "
        "kv:fp8@head.  [default: bf16,fp16,fp8,int8, or the dtypes of the runtime in --formats]",
    ),
    click.option(
        "--draws",
        type=click.IntRange(1, MOST_DRAWS),
        help="Number of backward passes for each sequence. More passes make the estimated scores more precise.  [default: 24 "
        "divided by the number of sequences, at least 4]",
    ),
    click.option(
        "--exact",
        is_flag=True,
        help="Measure the scores instead of estimating them: for each weight and dtype, run a forward pass in which only "
        "this weight is cast. This takes many passes.",
    ),
    click.option(
        "--save",
        type=click.Path(path_type=Path),
        help="Save the scan to this file while it runs. If the file exists, the scan continues from it, or is read if it is "
        "complete.",
    ),
    workers_option,
)


class _ScanCommand(ModelCommand):
    """The command `scan`, followed by MODEL or by `merge FILES`. A model folder named `merge` must be written as `./merge`."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args[:1] == ["merge"]:
            return merge.make_context(f"{info_name} merge", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


@click.command(cls=_ScanCommand, rules=False, also=REFERENCE)
@_scan_options
@click.option(
    "--shard",
    metavar="3/16",
    help="Run only one share of the scan, such as 3/16 (the third of sixteen), and write it to the --save file. slurm: a "
    "Slurm job array's environment variables say which share.",
)
@json_option
def scan(request: RunRequest, shard: str | None, as_object: bool, **how: Any) -> int:
    """Score each weight in each dtype: estimate how far the model's output drifts if this weight alone is cast to this dtype. A few
    backward passes give all scores.

    `dtype-engine scan merge FILES -o scan.json` combines the files of a scan that was divided by --shard.
    """
    options = _Scanning(**how)
    if shard is not None:
        _scan_shard(request, Shard.parse(shard, os.environ), as_object, options)
        return 0
    unwritten = UnwrittenFiles()
    session, task = _scanned(request, options, unwritten)
    report, left_out = task.report(), ""
    if options.dtype_names is None or options.family is not None:
        report, left_out = loaded_scores(session.tree, report, options.family or report.loader)
    experts, notices = session.expert_tokens()
    report = dataclasses.replace(report, experts=experts, notices=(*report.notices, *few_words(experts), *notices))
    if as_object:
        print_json(as_json(report))
    else:
        from dtype_engine.reports.text_scan import scan_text

        answer(scan_text(report))
    note((*report.notices, *([fill_hints(left_out, ON_THE_COMMAND_LINE)] if left_out else [])))
    if reason := _why_all_infinite(report):
        print_stderr(f"dtype-engine: {reason}")
    return unwritten.status or (NO if reason else 0)


def _why_all_infinite(report: ScanReport) -> str:
    """Return a sentence if no cast has a finite score, or ""."""
    scores = [weight.score for weight in report.weights if weight.score]
    if not scores or any(map(math.isfinite, scores)):
        return ""
    return "no score is finite: the output is not, in the reference or under every cast; drift names the operation"


@click.command(cls=ModelCommand, rules=False, also=(*REFERENCE, *METRICS))
@click.option(
    "--budget",
    metavar="SIZE",
    help="Find the recipe with the least predicted drift whose weights take at most this size: 12GiB, 500MB, or 45% of "
    "the stored size.",
)
@click.option(
    "--budget-active",
    metavar="SIZE",
    help="Instead of --budget: find the recipe with the least predicted drift of whose weights a token reads at most this size: "
    "2GiB, or 45% of what it reads of the stored weights.",
)
@bandwidth_option
@click.option(
    "--max-predicted",
    type=float,
    metavar="DRIFT",
    help="Find the smallest recipe whose predicted drift is at most this number. Its unit is that of a scan's scores: "
    "nats per token or, for outputs that are not probabilities, relative squared error.",
)
@click.option(
    "--keep",
    multiple=True,
    metavar="PATTERN",
    help="Keep all weights that this pattern matches in their stored dtypes; may be repeated.",
)
@click.option(
    "--group",
    "groups",
    multiple=True,
    metavar="PATTERN",
    help="Give the same dtype to all weights that match this pattern in the same parent module. '*.{q,k,v}_proj' does so "
    "for the three projections in each attention module. May be repeated.",
)
@click.option(
    "--only",
    multiple=True,
    metavar="PATTERN=DTYPE,...",
    help="Allow only certain dtypes for some weights: '*.mlp=bf16,fp8' for those that the pattern *.mlp matches. May be "
    "repeated; the last pattern that matches a weight decides.",
)
@click.option(
    "--context",
    type=click.IntRange(min=1),
    metavar="TOKENS",
    help="Also choose dtypes for KV caches, among those of --dtypes that begin with kv:. The caches' bytes, for sequences of "
    "this number of tokens, then count towards the recipe's size.",
)
@click.option(
    "--batch",
    type=click.IntRange(min=1),
    default=1,
    metavar="N",
    help="With --context: the number of sequences whose KV caches are counted.  [default: 1]",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the best recipe to this file, as YAML.")
@force_option
@click.option(
    "--measure/--no-measure",
    default=True,
    show_default=True,
    help="Also measure the drift of the best recipe, with a forward pass over each input. --no-measure leaves this out.",
)
@click.option(
    "--verify",
    "candidates",
    type=click.IntRange(min=2),
    metavar="K",
    help="Measure this number of recipes, at least 2, on the texts of --held-out: those whose predictions are nearest to the "
    "limit. Choose the best of them by measured drift and metrics. If --min or --max is the only limit, recipes of all sizes "
    "are measured, and the smallest one that meets it is chosen.",
)
@click.option(
    "--held-out",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A text file on which --verify measures the recipes, and which the scan does not use; may be repeated.",
)
@_scan_options
@min_and_max_options
@json_option
def search(
    request: RunRequest,
    budget: str | None,
    budget_active: str | None,
    bandwidth: float | None,
    max_predicted: float | None,
    keep: tuple[str, ...],
    groups: tuple[str, ...],
    only: tuple[str, ...],
    context: int | None,
    batch: int,
    output: Path | None,
    force: bool,
    measure: bool,
    candidates: int | None,
    held_out: tuple[Path, ...],
    as_object: bool,
    **how: Any,
) -> int:
    """Find the recipe with the least drift for a limit on size (--budget, --budget-active), or the smallest recipe for a limit on
    drift (--max-predicted), and report its predicted and its measured drift.

    A scan measures how much each weight adds to the drift in each dtype, and the predicted drift of a recipe is the sum over its
    weights. The model is scanned first, unless a complete scan is in the file that --save names.
    """
    from dtype_engine.core.atomic_write import check_target, write_text_atomic
    from dtype_engine.search.pareto import Constraints

    if output is not None:
        check_target(output, force)
    limits = min_and_max_limits(how, request.options.metrics)
    scanning = _Scanning(**{name: value for name, value in how.items() if name not in ("least", "most")})
    _check_limits(budget, budget_active, max_predicted, limits, candidates is not None)
    if (candidates is None and held_out) or (candidates is not None and not held_out and not request.options.metrics):
        raise UserError("--verify K and --held-out FILE go together, unless there is a --metric")
    held_out_options = dataclasses.replace(request.options, prompts=(), texts=held_out)
    check_files(held_out_options)
    rules = [parse_allowed(text) for text in only]
    of_caches = any(form.startswith(SCANNED) for _, allowed in rules for form in allowed)
    if context is None and (of_caches or SCANNED in (scanning.dtype_names or "")):
        raise UserError(f"formats that begin with {SCANNED} are for KV caches, whose bytes depend on --context TOKENS")
    unwritten = UnwrittenFiles()
    session, _ = _scanned(request, scanning, unwritten, only_loadable=True)
    experts, unknown = session.expert_tokens() if measure else ((), ())
    most, by = _budget(session.tree, budget, budget_active)
    family = scanning.family or session.model.loader
    constraints = Constraints(keep, groups, (), tuple(rules), context, batch, family, by)
    try:
        if session.scanned is not None and (reason := _why_all_infinite(session.scanned)):
            raise OutOfReach(reason)
        if candidates is None:
            report: SearchReport = session.search(most, max_predicted, constraints, measure)
        else:
            scanned = session.scanned
            if held_out:
                session.use_inputs(held_out_options)
            session.scanned = scanned  # the search uses the scan of the first inputs
            report = _verified(
                request, session, scanning.workers, candidates, (most, max_predicted), limits, constraints
            )
    except OutOfReach as error:
        if as_object:
            print_json({"model": session.model.title, "met": False, "reason": str(error)})
        print_stderr(f"dtype-engine: {error}")
        return NO
    if output is not None:
        with unwritten.reported():
            from dtype_engine.recipe.file import write_recipe
            from dtype_engine.runtime.session.rounding_notices import fitted_to

            recipe = Recipe.of(map(Rule.parse, report.rules))
            fitted = fitted_to((rule.dtype for rule in recipe.rules), session.calibration)
            text = write_recipe(recipe, report.model, session.settings, lost=report.lost, fitted_to=fitted)
            write_text_atomic(output, text, replace=force)
    report = dataclasses.replace(report, bandwidth=bandwidth)
    finite = report.measured is None or math.isfinite(report.measured)
    if not finite:
        print_stderr("dtype-engine: the output is not finite under this recipe")
    if as_object:
        print_json(as_json(report) | {"met": finite})
    else:
        from dtype_engine.reports.text_scan import search_text

        answer(search_text(report))
    note((*report.notices, *few_words(experts), *unknown))
    return unwritten.status or (0 if finite else NO)


@click.command
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    help="The file to which the combined scan is written.",
)
@force_option
def merge(files: tuple[Path, ...], output: Path, force: bool) -> None:
    """Combine the files that `scan --shard` wrote into the file of one scan, which `scan --save` and `search --save` can read.

    The combined scan is the same as a scan that was not divided.
    """
    from dtype_engine.core.atomic_write import check_target
    from dtype_engine.runtime.scan import saved
    from dtype_engine.runtime.scan.merge import merge as merged

    check_target(output, force)
    whole = merged(files)
    saved.write(output, whole)
    answer(f"{output}: {whole.parts} parts of {len(files)} files")


def _budget(tree: Tree, budget: str | None, active: str | None) -> tuple[int | None, SizeKind]:
    """Return (limit in bytes or None, what it limits). budget, active: of --budget and --budget-active."""
    if active is None:
        return (parse_bytes(budget, tree.stored_bytes) if budget is not None else None), "bytes"
    return parse_bytes(active, tree.active_bytes() or 0), "active"


def _check_limits(
    budget: str | None, active: str | None, max_predicted: float | None, limits: tuple[Limit, ...], verifies: bool
) -> None:
    """Raise UserError if limits are missing or exclude each other. limits: of --min, --max. verifies: whether --verify is given."""
    if limits and not verifies:
        raise UserError("--min and --max are limits on measured metrics: add --verify K")
    given = [limit for limit in (budget, active, max_predicted) if limit is not None]
    if len(given) > 1 or (not given and not limits):
        raise UserError("give one of --budget, --budget-active and --max-predicted")
    for size in filter(None, (budget, active)):
        parse_bytes(size, 0)


def _scan_shard(request: RunRequest, shard: Shard, as_object: bool, scanning: _Scanning) -> None:
    """Run one of the equal shares of a scan, and write it to the --save file."""
    save = scanning.save
    if save is None:
        raise UserError("--shard needs --save FILE, another file for every shard")
    session, task = _scanned(request, scanning, shard=shard)  # a share that can't be saved is of no use
    task.write(save)
    count = len(shard.of(range(task.parts)))
    if as_object:
        print_json(
            {"model": session.model.title, "shard": str(shard), "done": count, "parts": task.parts, "file": str(save)}
        )
        return
    answer(f"shard {shard}: {count} of {task.parts} parts are in {save}")
    answer("with the files of all shards: dtype-engine scan merge FILES -o scan.json")


def _scanned(
    request: RunRequest,
    scanning: _Scanning,
    unwritten: UnwrittenFiles | None = None,
    shard: Shard | None = None,
    only_loadable: bool = False,
) -> tuple[Session, ScanTask]:
    """Open a session and run its scan, or only the share of the scan that `shard` names.

    unwritten: is told if the scan can't be saved, and the scan continues. If None, UserError is raised.
    only_loadable: whether to raise UserError for a dtype in which the program that is to load the model loads no weight.
    """
    from dtype_engine.core.atomic_write import check_target

    if scanning.save is not None:
        check_target(scanning.save, replace=True)  # before hours of scanning
    given = parse_dtypes(scanning.dtype_names) if scanning.dtype_names is not None else None
    source = request.locate()
    session = request.open_session(source)
    family = scanning.family or session.model.loader
    names = tuple(given or FAMILIES[family].dtypes)
    if only_loadable:
        require_loadable(session.tree, family, names)
    draws, exact, save = scanning.draws, scanning.exact, scanning.save
    task = session.scan_task(names, draws, exact, save)
    task.on_unsaved = unwritten.add if unwritten is not None else None
    if shard is not None:
        task.shard = shard
    if scanning.workers is not None and (parts := len(task.pending())):
        from dtype_engine.evaluation import work

        with over_workers(scanning.workers, session, source, parts, task.private_bytes) as (over, show):
            assert over is not None
            work.scan(session, task, over, lambda what, done, total: show(done, parts))
    elif task.pending() or shard is None:
        session.scan(names, draws, exact, save, say_count)
    say("")
    return session, task


def _verified(
    request: RunRequest,
    session: Session,
    workers: str | int | None,
    count: int,
    limit: tuple[int | None, float | None],
    metrics: tuple[Limit, ...],
    constraints: Constraints,
) -> SearchReport:
    """Measure up to `count` recipes that are near a limit according to a scan, and return a report on the best of them. Raises
    UserError, and OutOfReach if no recipe meets the limit.

    limit: (maximum number of bytes or None, maximum drift or None). metrics: limits on the user's metrics.
    """
    from dtype_engine.evaluation import verified

    found = session.front(constraints).candidates(*limit, count)
    source = request.locate()
    with over_workers(workers, session, source, len(found), session.tree.stored_bytes) as (over, show):
        return verified.best(session, found, limit, metrics, constraints, over, lambda done: show(done, len(found)))
