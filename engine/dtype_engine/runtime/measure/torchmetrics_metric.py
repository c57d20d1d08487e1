"""Makes metrics of the package torchmetrics measurable example by example. The package need not be installed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from dtype_engine.core.errors import UserError
from dtype_engine.runtime.measure.paired import Aggregate
from dtype_engine.runtime.passes.outputs import main_output

_LABELS = ("labels", "label", "targets", "target")


def is_torchmetrics(value: Any) -> bool:
    """Return whether a value has the methods of a torchmetrics `Metric`."""
    return isinstance(value, torch.nn.Module) and all(hasattr(value, name) for name in ("update", "compute", "reset"))


def per_example(metric: Any) -> tuple[Callable[[Any, dict[str, Any]], list[Any]], Aggregate]:
    """Split a torchmetrics metric into two functions. The first returns the metric's state after each example by itself, given the
    model's output and its inputs. The second computes the metric from these states.

    The metric is updated with the main output and the labels among the inputs. If the output and the labels have positions, the
    output's classes are moved to its second dimension, where torchmetrics expects them. The first function raises UserError for
    inputs without labels.
    """

    def states(output: Any, inputs: dict[str, Any]) -> list[Any]:
        labels = next((inputs[name] for name in _LABELS if name in inputs), None)
        if not isinstance(labels, torch.Tensor):
            raise UserError(
                f"a torchmetrics object needs a tensor among the inputs that is named {' or '.join(_LABELS)}"
            )
        _, scores = main_output(output)
        if scores.ndim > 2 and scores.shape[:-1] == labels.shape:
            scores = scores.movedim(-1, 1)
        found = []
        for at in range(len(labels)):
            metric.reset()
            metric.update(scores[at : at + 1], labels[at : at + 1])
            found.append(_State(metric.metric_state))
        return found

    def compute(all_states: list[_State]) -> float:
        metric.reset()
        gathered: dict[int, list[Any]] = {}
        for name, value in all_states[0].values.items():
            if isinstance(value, list):
                setattr(metric, name, [tensor for state in all_states for tensor in state.values[name]])
            else:
                setattr(metric, name, own := value.clone())
                gathered[id(own)] = [state.values[name] for state in all_states]
        # torchmetrics combines the states of examples as those of several processes.
        metric.sync(lambda tensor, group: gathered.get(id(tensor), [tensor]), distributed_available=lambda: True)
        combined = metric.metric_state
        metric.unsync()
        for name, value in combined.items():
            if not isinstance(all_states[0].values[name], list):
                setattr(metric, name, value)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torchmetrics warns that `update` was not called
            return float(metric.compute())

    return states, compute


class _State:
    def __init__(self, values: dict[str, Any]) -> None:
        self.values = {
            name: value if isinstance(value, torch.Tensor) else list(value) for name, value in values.items()
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _State) and all(
            _equal(value, other.values[name]) for name, value in self.values.items()
        )

    __hash__ = None  # type: ignore[assignment]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return len(one) == len(other) and all(map(torch.equal, one, other))
