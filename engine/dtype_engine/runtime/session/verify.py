"""Verifies an export against the model that it was made of: one that is named, or one that is open in a session."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from dtype_engine.checkpoint import Checkpoint, open_checkpoint, refuse_changed
from dtype_engine.checkpoint.source import Source
from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import UserError
from dtype_engine.core.options import ModelOptions, Options
from dtype_engine.recipe.file import read_recipe_file
from dtype_engine.results.drift import OutputDrift
from dtype_engine.results.export import VerifyReport
from dtype_engine.runtime.building.filling import load_into
from dtype_engine.runtime.building.load import load, load_module
from dtype_engine.runtime.export.file_layout import in_layout, layout_in
from dtype_engine.runtime.export.plan import of_checkpoint, of_live
from dtype_engine.runtime.export.write import OnBytes
from dtype_engine.runtime.measure.drift import DriftMeter, budget_for
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.session.opening import open_session
from dtype_engine.runtime.session.session import Session
from dtype_engine.runtime.session.verify_rounded import with_rounding_errors
from dtype_engine.runtime.verify.source_values import of_module
from dtype_engine.runtime.verify.verify import CompareItems, as_exported, report_on, values_of


def verify(
    folder: Path,
    source: Source,
    drift: bool = False,
    options: Options | None = None,
    on_bytes: OnBytes = lambda done, total: None,
    cancelled: IsCancelled = never,
    elsewhere: CompareItems | None = None,
) -> VerifyReport:
    """Compare an exported folder with `source` cast by the folder's recipe. Both are read with loaders that the exporter does not
    use.

    drift: whether to also run the export and the cast source, whose drifts from the reference must be equal. on_bytes, elsewhere:
    as for `compare`; with `elsewhere`, the source must be a checkpoint. Raises UserError if the folder or the source can't be read,
    NoForward if the model can't be run for `drift`, and Cancelled.
    """
    started = time.perf_counter()
    file = read_recipe_file(folder / "recipe.yaml")
    options = as_exported(options or Options(), file)
    checkpoint = source.open()
    session: Session | None = None
    if checkpoint is None:
        if elsewhere is not None:
            raise UserError(f"{source.title} {source.no_headers}: verify what it makes without --workers")
        session = open_session(source, options)
        values = of_module(session.model.module)  # values from the code, before the recipe is applied
        session.apply(file.recipe)
        contents = of_live(session.model, file.recipe, session.plan.dtypes, options.settings)
    else:
        if drift:
            session = open_session(source, options)
            session.apply(file.recipe)
        contents = of_checkpoint(checkpoint, source.title, file.recipe, options)
        values = values_of(checkpoint, contents, source.trust_pickle)
        if session is None and any(item.rounding for item in contents.items):
            session = open_session(source, options)
    contents = in_layout(contents, layout_in(folder))
    report = report_on(folder, contents, values, on_bytes, cancelled, elsewhere)
    if session is not None:
        report = with_rounding_errors(report, session.model, session.calibration, contents, values, folder, cancelled)
    before = after = None
    if drift and session is not None and not report.differences:
        before = session.drift(cancelled=cancelled).output
        after = drift_of_export(session, source, open_checkpoint(folder), options, cancelled)
        refuse_changed(contents.identities)
    return dataclasses.replace(report, seconds=time.perf_counter() - started, drift_before=before, drift_after=after)


def drift_of_export(
    session: Session,
    source: Source,
    exported: Checkpoint,
    options: ModelOptions,
    cancelled: IsCancelled = never,
) -> OutputDrift:
    """Measure the drift of the model that is loaded from an export (`exported`). The reference is the model that was exported.
    session: the open source of the export. source: what the session was opened from. Raises UserError if the two models do not
    have the same weights, or if the model can't be run.
    """
    model, inputs = session.model, session.inputs
    if model.checkpoint is not None:
        loaded = load_module(exported, exported.path.name, options)
    else:
        loaded = load_into(load(source, options).module, exported)
    back = LiveModel.wrap(loaded.module, exported.path.name, model.device, sources=loaded.sources)
    if back.weights.keys() != model.weights.keys():
        raise UserError(
            f"{exported.path}: its model has other weights than {model.title}, so their drift can't be compared"
        )
    for name, weight in back.weights.items():  # treat each as a cast of the source's weight
        original = model.weights[name]
        weight.dtype = weight.info.dtype
        weight.info, weight.other_reference = original.info, original.reference
    back.tree = model.tree
    if inputs is None:
        raise UserError(session.why_no_forward or "the model can't be run")
    meter = DriftMeter(back, inputs, budget=budget_for(back))
    meter.settings = session.settings
    return meter.measure(cancelled=cancelled).output
