"""Finds which programs load an export without holding up a frame."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from textual.dom import DOMNode

from dtype_engine.recipe import Plan
from dtype_tui.state.loading import loadings

if TYPE_CHECKING:
    from dtype_engine.recipe.loading import Loading
    from dtype_tui.state.experiment import Experiment

_MANY = 400
"""The most tensors for which no thread is used."""


def takes_a_thread(experiment: Experiment, plan: Plan) -> bool:
    """Return whether it takes so long to find which programs load an export that the screen has to say that it is being found."""
    return experiment.model.live and experiment.tree.has_classes and len(plan.dtypes) > _MANY


def find_loadings(
    node: DOMNode, experiment: Experiment, plan: Plan, found: Callable[[tuple[Loading, ...]], None]
) -> None:
    """Call `found` with how programs load an export of a plan: after the next frame or, for a large model, from a worker."""
    if not takes_a_thread(experiment, plan):
        node.call_after_refresh(lambda: found(loadings(experiment, plan)))
        return

    def find() -> None:
        node.app.call_from_thread(found, loadings(experiment, plan))

    node.run_worker(find, thread=True, exclusive=True, group="loadings")
