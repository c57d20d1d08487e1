"""Measures and estimates the memory of activations in the dtype in which the model computes under a session's recipe."""

from __future__ import annotations

from collections.abc import Sequence

from dtype_engine.core.cancellation import IsCancelled
from dtype_engine.core.errors import Cancelled, NoForward
from dtype_engine.core.options import ModelOptions
from dtype_engine.recipe import Plan, Recipe, Rule
from dtype_engine.recipe.serving_memory import serving_dtype
from dtype_engine.results.serving_memory import ActivationMemory
from dtype_engine.runtime.measure.activation_memory import estimator_of, measured
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.passes.state_restore import stored_values
from dtype_engine.runtime.session.casting import Casting


def measured_activations(model: LiveModel, casting: Casting, context: int, batch: int) -> ActivationMemory:
    """Measure the activations of a pass over `batch` prompts of `context` tokens, in the dtype that most weights have under the
    recipe of `casting`. Raises NoForward.
    """
    dtype, tree = _computed_in(model, casting.plan), model.tree
    if dtype == serving_dtype(tree.totals()[""], tree.kv_cache):
        with stored_values(model):
            return measured(model.module, context, batch)
    recipe = casting.plan.recipe
    try:
        casting.use(Recipe.of([Rule.parse(f"*={dtype}")]))
        return measured(model.module, context, batch)
    finally:
        casting.use(recipe)


def estimated_activations(
    model: LiveModel, plan: Plan, options: ModelOptions, contexts: Sequence[int], batch: int, cancelled: IsCancelled
) -> tuple[ActivationMemory, ...]:
    """Estimate the activations of passes over `batch` prompts, for each length in `contexts`, without running the model. The passes
    compute in the dtype that most weights have under `plan`. Raises NoForward, also for a model that is Python code, and Cancelled.
    """
    checkpoint = model.checkpoint
    if checkpoint is None:
        raise NoForward(f"{model.title} is code, and only checkpoints can be estimated")
    estimator, found = estimator_of(checkpoint, options, _computed_in(model, plan)), []
    for context in contexts:
        if cancelled():
            raise Cancelled
        found.append(estimator.estimate(context, batch))
    return tuple(found)


def _computed_in(model: LiveModel, plan: Plan) -> str:
    return serving_dtype(model.tree.totals(plan.dtypes)[""], model.tree.kv_cache)
