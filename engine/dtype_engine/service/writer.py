"""Runs save requests: exports a checkpoint, writes a recipe file or report, or converts a recipe. Imports torch lazily."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dtype_engine.core.atomic_write import check_target, write_text_atomic
from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import NoForward, UserError
from dtype_engine.core.hints import ON_THE_COMMAND_LINE, fill_hints
from dtype_engine.core.options import RunSettings
from dtype_engine.core.text import printable
from dtype_engine.core.throttle import Throttle
from dtype_engine.core.tree import Tree
from dtype_engine.core.units import human_bytes, seconds_text
from dtype_engine.recipe import Plan, Recipe, make_plan, require_matches
from dtype_engine.results.attribution import NonFiniteDiagnosis
from dtype_engine.results.drift import DriftReport
from dtype_engine.service.open_model import OpenModel
from dtype_engine.service.planned_losses import MAX_AUTOMATIC_BYTES, PlannedLosses
from dtype_engine.service.save_requests import (
    ConvertRequest,
    ExportPlan,
    ExportRequest,
    RecipeRequest,
    ReportRequest,
    SaveRequest,
)
from dtype_engine.service.worker_processes import OnProgress

if TYPE_CHECKING:
    from dtype_engine.results.losses import ValueLoss
    from dtype_engine.runtime.export import Contents


@dataclass(frozen=True)
class SaveContext:
    """The model, settings and recipe from which a save request is run."""

    model: OpenModel
    settings: RunSettings
    recipe: Recipe
    planned_losses: PlannedLosses = field(default_factory=PlannedLosses)
    on_progress: OnProgress = lambda what, done, total: None
    """A function of (the current step in a few words, bytes done, total bytes)."""
    cancelled: IsCancelled = never

    def plan(self, tree: Tree) -> Plan:
        """Return the recipe's plan. Raises TooSlow if a pattern takes too long to match, because the plan would be incomplete."""
        plan = make_plan(tree, self.recipe)
        plan.refuse_too_slow()
        return plan


def plan_export(context: SaveContext) -> ExportPlan:
    """Return what an export of the recipe would write. Raises UserError if the recipe can't be exported."""
    from dtype_engine.runtime.export.export import SHARD_SIZE, names_of, shards
    from dtype_engine.runtime.export.one_file import reason_against
    from dtype_engine.runtime.export.readme import by_dtype, loading_text

    contents, session = _contents(context), context.model.session
    return ExportPlan(
        contents.nbytes,
        len(names_of(shards(contents, SHARD_SIZE))),
        tuple((name, share.tensors, share.nbytes) for name, share in by_dtype(contents).items()),
        loading_text(contents),
        contents.notices,
        session.model.known_losses(context.plan(session.tree).dtypes) if session is not None else _losses(context, 0),
        reason_against(contents) or "",
    )


def run_save(request: SaveRequest, context: SaveContext) -> tuple[str, tuple[str, ...]]:
    """Write the file or folder of `request`. Returns (a sentence about what was written, notices). Raises UserError, Cancelled."""
    if isinstance(request, ExportRequest):
        return _export(request, context)
    check_target(request.file, request.replace)
    text, notices = compose(request, context)
    return f"wrote {printable(str(write_text_atomic(request.file, text, request.replace)), 300)}", notices


def compose(
    request: ConvertRequest | RecipeRequest | ReportRequest, context: SaveContext
) -> tuple[str, tuple[str, ...]]:
    """Return (the text of the file of `request`, notices for the user). Raises UserError, Cancelled."""
    if isinstance(request, ConvertRequest):
        return _converted(request, context)
    if isinstance(request, RecipeRequest):
        return _recipe_text(request, context)
    return _report_text(request, context)


def _losses(context: SaveContext, max_bytes: int = MAX_AUTOMATIC_BYTES) -> tuple[ValueLoss, ...] | None:
    """Return how many values of each weight the casts lose. None if they are unknown: nothing is open, or the model is not loaded
    and more than `max_bytes` of its files must be read.
    """
    model = context.model
    if model.session is not None:
        return model.session.lost_values(context.cancelled, context.plan(model.session.tree))
    if model.checkpoint is None:
        return None
    from dtype_engine.runtime.measure.planned_casts import losses_in_files

    tree, counting = model.tree(), context.planned_losses
    plan = context.plan(tree)
    if counting.waiting_bytes(model.checkpoint, tree, plan) > max_bytes:
        return None
    return losses_in_files(model.checkpoint, tree, plan.dtypes, counting.counted, cancelled=context.cancelled)


def _contents(context: SaveContext) -> Contents:
    from dtype_engine.runtime.export import of_checkpoint, of_live

    model, recipe = context.model, context.recipe
    if model.session is not None:
        tree = model.session.tree
        return of_live(model.session.model, recipe, require_matches(tree, recipe).dtypes, context.settings)
    if model.checkpoint is None:
        raise UserError("the model is not open")
    return of_checkpoint(
        model.checkpoint, context.model.source.title, recipe, replace(model.options, settings=context.settings)
    )


def _contents_to_write(context: SaveContext) -> Contents:
    """Return the tensors that an export writes. If it needs scales for activations (NVFP4) or KV caches, or roundings are fitted to
    inputs, run the inputs first.
    """
    from dtype_engine.runtime.export.input_scales import needs_calibration
    from dtype_engine.runtime.export.rounded import needs_fitting

    contents, session = _contents(context), context.model.session
    has_caches = session is not None and bool(make_plan(session.tree, context.recipe).caches)
    if session is None or not (needs_calibration(contents) or needs_fitting(contents) or has_caches):
        return contents
    context.on_progress("running the inputs", 0, 1)
    session.use_recipe(context.recipe, cancelled=context.cancelled)
    return session.export_contents(context.cancelled)


def _export(request: ExportRequest, context: SaveContext) -> tuple[str, tuple[str, ...]]:
    from dtype_engine.checkpoint.export_folder import check_export
    from dtype_engine.runtime.export import export
    from dtype_engine.runtime.export.file_layout import in_layout

    source = context.model.source
    check_export(request.folder, request.replace, [source.path] if source.path is not None else [])
    losses = _losses(context, 0)  # without a live model, losses are counted during the export
    report = export(
        in_layout(_contents_to_write(context), request.layout),
        request.folder,
        on_bytes=_with_rate(context.on_progress),
        cancelled=context.cancelled,
        force=request.replace,
        lost=losses,
    )
    rate = f", {human_bytes(report.nbytes / report.seconds)}/s" if report.seconds else ""
    size = f"{human_bytes(report.nbytes)} in {seconds_text(report.seconds)}{rate}"
    return f"exported to {printable(report.folder, 300)}: {size}", report.notices


def _recipe_text(request: RecipeRequest, context: SaveContext) -> tuple[str, tuple[str, ...]]:
    from dtype_engine.recipe.provenance import recipe_text
    from dtype_engine.reports.versions import versions
    from dtype_engine.runtime.session.rounding_notices import fitted_to

    tree = context.model.tree()
    plan = require_matches(tree, context.recipe)
    notices = () if request.drift is not None else ("the recipe was not measured: the file has no drift",)
    losses = _losses(context)
    session = context.model.session
    fitted = None if session is None else fitted_to(plan.dtypes.values(), session.calibration)
    return recipe_text(
        tree, plan, context.model.source.title, context.settings, request.drift, versions(), losses, fitted
    ), notices


def _report_text(request: ReportRequest, context: SaveContext) -> tuple[str, tuple[str, ...]]:
    from dtype_engine.reports.document import Measured, build_report
    from dtype_engine.reports.render import check_name, render
    from dtype_engine.reports.versions import versions

    check_name(request.file)
    drift, nonfinite, reason = (
        (request.drift, request.nonfinite, "") if request.drift is not None else _measured(context)
    )
    tree = context.model.tree()
    plan, losses = context.plan(tree), _losses(context)
    report = build_report(
        tree,
        plan,
        context.model.source.title,
        context.settings,
        Measured(drift, reason, losses, nonfinite, request.speed),
        versions(),
        context.model.provenance,
    )
    return render(report, request.file), (f"without drift: {reason}",) if reason else ()


def _measured(context: SaveContext) -> tuple[DriftReport | None, NonFiniteDiagnosis | None, str]:
    """Measure the recipe. Returns (the drift, a diagnosis if values are not finite, ""), or (None, None, why it can't be run)."""
    session = context.model.session
    if session is None:
        return None, None, fill_hints(context.model.why_closed, ON_THE_COMMAND_LINE) or "the model is not open"
    session.use_recipe(context.recipe, cancelled=context.cancelled)
    try:
        report = session.drift(cancelled=context.cancelled)
        return report, session.nonfinite(report, cancelled=context.cancelled), ""
    except NoForward as error:
        return None, None, str(error)


def _converted(request: ConvertRequest, context: SaveContext) -> tuple[str, tuple[str, ...]]:
    from dtype_engine.recipe.targets import Context, target_named
    from dtype_engine.runtime.building.describe import describe

    described = describe(context.model.source, context.model.options)
    tree = described.tree
    plan, activations = require_matches(tree, context.recipe), context.settings.quantize_activations
    conversion = target_named(request.target).convert(
        Context(tree, plan, context.model.source.title, described.model_type, described.kinds, activations)
    )
    notices: tuple[str, ...] = conversion.notes
    if left_out := sum(len(entry.tensors) for entry in conversion.left_out):
        first = conversion.left_out[0]
        notices += (
            f"{request.target} can't express {left_out} tensors as planned, "
            f"first {printable(first.tensors[0])}: {first.why}",
        )
    return conversion.text, notices


def _with_rate(on_progress: OnProgress) -> Callable[[int, int], None]:
    """Return a callback `(bytes written, total bytes)` that reports progress with the rate, as in `exporting: 310.00 MiB/s`."""
    started, throttle = time.perf_counter(), Throttle()

    def on_bytes(done: int, total: int) -> None:
        if throttle.due(last=done == total):
            seconds = time.perf_counter() - started
            rate = f": {human_bytes(done / seconds)}/s" if done and seconds > 0 else ""
            on_progress(f"exporting{rate}", done, total)

    return on_bytes
