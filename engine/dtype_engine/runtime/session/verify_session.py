"""Compares an exported folder with the model of an open session."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from dtype_engine.checkpoint.export_folder import is_export
from dtype_engine.core.cancellation import IsCancelled
from dtype_engine.core.errors import UserError
from dtype_engine.core.options import Options
from dtype_engine.recipe import Plan, Recipe, make_plan
from dtype_engine.results.export import VerifyReport
from dtype_engine.runtime.export.file_layout import in_layout, layout_in
from dtype_engine.runtime.export.plan import of_live
from dtype_engine.runtime.export.write import OnBytes
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.session.calibration import Calibration
from dtype_engine.runtime.session.verify_rounded import with_rounding_errors
from dtype_engine.runtime.verify.source_values import of_module
from dtype_engine.runtime.verify.verify import report_on, values_of


def verify_open(
    model: LiveModel,
    plan: Plan,
    options: Options,
    calibration: Calibration | None,
    folder: Path,
    on_bytes: OnBytes,
    cancelled: IsCancelled,
) -> VerifyReport:
    """Compare an exported folder with a model, cast by a plan. The stored values of a model without a checkpoint are put back for
    this, which the caller undoes. options: those of the session, with its current settings. Raises what `Session.verify` raises.
    """
    if not is_export(folder):
        raise UserError(
            f"{folder} is no folder that this program exported: `dtype-engine verify` compares other checkpoints"
        )
    contents = in_layout(of_live(model, plan.recipe, plan.dtypes, options.settings), layout_in(folder))
    if model.checkpoint is not None:
        values = values_of(model.checkpoint, contents, options.trust_pickle)
    else:
        model.apply(make_plan(model.tree, Recipe()).dtypes)
        values = dataclasses.replace(of_module(model.module), unchecked=())  # they are the model's own
    report = report_on(folder, contents, values, on_bytes, cancelled)
    return with_rounding_errors(report, model, calibration, contents, values, folder, cancelled)
