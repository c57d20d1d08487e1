"""Counts the weight values in a checkpoint's files that casts make infinite or zero, for a model that could not be loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dtype_engine.core.cancellation import IsCancelled
from dtype_engine.core.errors import UserError
from dtype_engine.core.hints import hint
from dtype_engine.core.units import human_bytes
from dtype_engine.recipe import Plan, Recipe, make_plan
from dtype_engine.service import events
from dtype_engine.service.jobs import LOSS_REMEDY, Ask

if TYPE_CHECKING:
    from dtype_engine.checkpoint import Checkpoint
    from dtype_engine.core.tree import Tree
    from dtype_engine.results.losses import ValueLoss
    from dtype_engine.runtime.numerics.overflow_underflow import Counted

MAX_AUTOMATIC_BYTES = 8 << 30
"""Maximum number of bytes of weight values to read without a request of the user."""


class PlannedLosses:
    """Counts the weight values that casts lose. A tensor is read only once for each dtype."""

    def __init__(self) -> None:
        self.counted: Counted = {}

    def emit_losses(
        self,
        checkpoint: Checkpoint,
        tree: Tree,
        recipe: Recipe,
        emit: Callable[[events.Event], None],
        cancelled: IsCancelled,
        read_all: bool = False,
    ) -> None:
        """Emit a `CastDone` event with the values that the recipe's casts lose and, if there are any, the result of the job
        `LOSS_REMEDY`: rules that keep these values. Raises Cancelled.

        Unless `read_all` is set, nothing is read if more than `MAX_AUTOMATIC_BYTES` are needed; the event then says how many.
        """
        plan = make_plan(tree, recipe)
        if all(dtype == tree.tensors[name].dtype for name, dtype in plan.dtypes.items()):
            emit(events.CastDone(recipe, ()))  # nothing is cast, so the import of torch can be saved
            return
        if checkpoint.headers_alone:
            emit(events.CastDone(recipe, None))  # why there is no drift says enough
            return
        waiting = self.waiting_bytes(checkpoint, tree, plan)
        if waiting > MAX_AUTOMATIC_BYTES and not read_all:
            words = f"{human_bytes(waiting)} of values are not read automatically: {hint('lost-values')}"
            emit(events.CastDone(recipe, None, words))
            return
        from dtype_engine.runtime.measure.loss_remedy import untried_remedy
        from dtype_engine.runtime.measure.planned_casts import losses_in_files
        from dtype_engine.runtime.numerics.overflow_underflow import count_losses
        from dtype_engine.runtime.weights.checkpoint_weights import source_of

        def count(name: str, dtype: str) -> ValueLoss | None:
            key = name, dtype
            names = checkpoint.names_of(tree.tensors[name]) if name in tree.tensors else (name,)
            if key not in self.counted and len(names) == 1:
                self.counted[key] = count_losses(
                    name, source_of(checkpoint, names[0]).read(), dtype, cancelled=cancelled
                )
            return self.counted.get(key)

        def progress(done: int, total: int) -> None:
            emit(events.WorkingProgress(recipe, "looking for values that the casts lose", done, total))

        try:
            losses = losses_in_files(checkpoint, tree, plan.dtypes, self.counted, progress, cancelled)
        except UserError as error:
            emit(events.CastDone(recipe, None, f"could not be looked at: {error}"))
            return
        emit(events.CastDone(recipe, losses))
        found = untried_remedy(tree, plan, losses, count, "there is no live model to run")
        if found is not None:
            emit(events.JobDone(recipe, Ask(LOSS_REMEDY.name), found))

    def waiting_bytes(self, checkpoint: Checkpoint, tree: Tree, plan: Plan) -> int:
        """Return how many bytes of weights must be read to count the losses of a plan's casts that were not counted before."""
        found = 0
        for name, dtype in plan.dtypes.items():
            names = checkpoint.names_of(tree.tensors[name]) if dtype != tree.tensors[name].dtype else ()
            shown = (name,) if len(names) == 1 else names
            if any((each, dtype) not in self.counted for each in shown):
                found += tree.tensors[name].nbytes
        return found
