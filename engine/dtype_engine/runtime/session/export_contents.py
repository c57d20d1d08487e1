"""Finds what an export of a session's model writes. If a format needs scales of activations or KV caches, the model is run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from dtype_engine.core.cancellation import IsCancelled
from dtype_engine.core.options import RunSettings
from dtype_engine.recipe import Plan
from dtype_engine.results.rounding import FittedTo
from dtype_engine.runtime.inputs import Inputs
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.passes.model_behavior import ModelBehavior
from dtype_engine.runtime.passes.runner import ForwardRunner

if TYPE_CHECKING:
    import torch

    from dtype_engine.runtime.export import Contents


def contents_of(
    model: LiveModel,
    plan: Plan,
    settings: RunSettings,
    need_inputs: Callable[[], Inputs],
    behavior: ModelBehavior,
    cancelled: IsCancelled,
    fitted_to: FittedTo | None = None,
) -> Contents:
    """Return the contents of an export of `model` under `plan`. If the export stores scales of activations or KV caches, the model
    is run on the inputs that `need_inputs` returns. fitted_to: what the roundings of the plan were fitted to. Raises what
    `Session.export` raises.
    """
    from dtype_engine.runtime.export import of_live
    from dtype_engine.runtime.export.cache_scales import cache_scheme, module_in_files, with_cache_scales
    from dtype_engine.runtime.export.input_scales import needs_calibration
    from dtype_engine.runtime.export.rounded import rounding_notices
    from dtype_engine.runtime.measure.activation_ranges import input_ranges

    contents = of_live(model, plan.recipe, plan.dtypes, settings)
    if needs_calibration(contents):
        names = [item.name for item in contents.items if item.input_scale is not None]
        ranges = input_ranges(model, need_inputs(), settings, names, cancelled, behavior)
        contents = of_live(model, plan.recipe, plan.dtypes, settings, ranges)
    notices = (*contents.notices, *rounding_notices(contents.items))
    contents = dataclasses.replace(contents, fitted_to=fitted_to, notices=notices)
    if not plan.caches:
        return contents
    amax: Mapping[str, torch.Tensor] = {}
    if cache_scheme(model.tree, plan.caches) is not None:
        with ForwardRunner(model, settings, cancelled, behavior=behavior) as runner:
            runner.calibrate_caches(need_inputs().batches)
            amax = runner.amax_of("candidate")
    return with_cache_scales(contents, model.tree, plan.caches, amax, functools.partial(module_in_files, model))
