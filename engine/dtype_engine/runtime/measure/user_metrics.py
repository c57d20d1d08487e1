"""Loads the user's own metrics, such as an accuracy, and measures them in the reference run and in the candidate run."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from dtype_engine.checkpoint.source import locate_metric
from dtype_engine.core.cancellation import IsCancelled
from dtype_engine.core.errors import UserError
from dtype_engine.core.foreign_code import failures_as, with_line
from dtype_engine.core.input_limits import InputLimits
from dtype_engine.core.options import QUERIES, RunSettings, evaluation
from dtype_engine.core.text import printable
from dtype_engine.core.user_folders import expanded
from dtype_engine.results.metrics import MetricChange
from dtype_engine.runtime.building.python_source import import_named
from dtype_engine.runtime.inputs import Inputs
from dtype_engine.runtime.measure.listener import OnProgress
from dtype_engine.runtime.measure.paired import Aggregate, Examples, compare, epsilon_of
from dtype_engine.runtime.measure.queries_metric import queries_function
from dtype_engine.runtime.measure.torchmetrics_metric import is_torchmetrics, per_example
from dtype_engine.runtime.model.containers import with_tensors
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.passes.model_behavior import ModelBehavior
from dtype_engine.runtime.passes.runner import ForwardRunner


@dataclass(frozen=True, slots=True)
class OutputMetric:
    """A metric of the model's outputs: `function(output, inputs)` is called once for every batch."""

    name: str
    function: Callable[[Any, dict[str, Any]], Any]
    """Returns a list or a tensor with one value for each example, or the value of a single example."""
    aggregate: Aggregate | None
    file: str | None = None
    """The Python file of the function, for errors. None if it is the code of a package."""


@dataclass(frozen=True, slots=True)
class ModelMetric:
    """Metrics that are measured by calling the model as often as `function` needs, such as those of an evaluation harness."""

    name: str
    function: Callable[[LiveModel, Inputs], Mapping[str, Examples]]
    """Returns the values of all examples by metric name."""
    file: str | None = None
    """The Python file of the function, for errors. None if it is the code of a package."""


def load_metrics(texts: Sequence[str], limits: InputLimits) -> tuple[OutputMetric | ModelMetric, ...]:
    """Return the metrics that `texts` name, as in `Options.metrics`, such as `metrics.py:accuracy`. This runs the user's Python
    files. limits: on files of queries. Raises UserError for a metric that does not exist, and if two have the same name.
    """
    metrics = tuple(_load(text, limits) for text in texts)
    for name, count in Counter(metric.name for metric in metrics).items():
        if count > 1:
            raise UserError(f"{count} metrics have the name {name}: give them different names")
    return metrics


def _load(text: str, limits: InputLimits) -> OutputMetric | ModelMetric:
    if (found := evaluation(text)) is not None:
        prefix, named = found
        if prefix == QUERIES:
            return ModelMetric(text, queries_function(expanded(named), limits))
        from dtype_engine.runtime.measure.lm_eval_metric import lm_eval_function

        return ModelMetric(text, lm_eval_function(named))
    source = locate_metric(text)
    made, module = import_named(source)
    name = str(source.attribute)
    if is_torchmetrics(made):
        return OutputMetric(name, *per_example(made))
    if not callable(made):
        raise UserError(
            f"{source.title} is a {type(made).__name__}, and a metric is a function or a torchmetrics object"
        )
    aggregate = getattr(made, "aggregate", None)
    takes = list(inspect.signature(made).parameters)
    if takes[:1] == ["model"]:
        return ModelMetric(name, partial(_of_model, made, name, aggregate, len(takes) > 1), module.__file__)
    if len(takes) != 2:
        raise UserError(
            f"{source.title} takes ({', '.join(takes)}): a metric takes (output, inputs), (model) or (model, inputs)"
        )
    return OutputMetric(name, made, aggregate, module.__file__)


def _of_model(
    function: Callable[..., Any],
    name: str,
    aggregate: Aggregate | None,
    takes_inputs: bool,
    model: LiveModel,
    data: Inputs,
) -> Mapping[str, Examples]:
    given = [[batch.on(model.device).named(model.module) for batch in data.batches]] if takes_inputs else []
    returned = function(model.module, *given)
    return {name: Examples(_values(name, returned, aggregate), aggregate, epsilon_of(returned))}


@dataclass
class MetricMeter:
    """Measures the user's metrics. Their values in the reference run are measured once and kept."""

    model: LiveModel
    metrics: tuple[OutputMetric | ModelMetric, ...]
    data: Inputs
    behavior: ModelBehavior
    _reference: dict[str, Examples] | None = field(default=None, init=False)

    def measure(
        self, settings: RunSettings, on_progress: OnProgress, cancelled: IsCancelled
    ) -> tuple[MetricChange, ...]:
        """Return the value of each metric in the reference run and with the model as it is currently cast.

        `on_progress(what, done, total)` is called with the run and the metrics, such as "candidate, accuracy", and with numbers of
        batches. Raises UserError if a metric fails, does not return numbers or can't run as the recipe asks, and NoForward,
        KernelError, Cancelled.
        """
        runs_itself = next((each.name for each in self.metrics if isinstance(each, ModelMetric)), None)
        if self.model.state_formats and runs_itself is not None:
            raise UserError(
                f"{runs_itself} runs the model by itself, on whole texts, where recurrent states are not rounded after each token: "
                "leave out their formats, or this metric"
            )
        watch = bool(self.model.cache_formats)
        with ForwardRunner(self.model, settings, cancelled, watch, self.behavior) as runner:
            if self._reference is None:
                self._reference = self._run(runner, "reference", on_progress)
            candidate = self._run(runner, "candidate", on_progress)
        changes = []
        files = {metric.name: metric.file for metric in self.metrics}
        for name, examples in self._reference.items():
            with failures_as(UserError, f"{name}: computing it failed", with_line(files.get(name))):
                changes.append(compare(name, examples, candidate.get(name, Examples())))
        return tuple(changes)

    def _run(self, runner: ForwardRunner, side: str, on_progress: OnProgress) -> dict[str, Examples]:
        """Return the metrics' values for all examples in one run, by metric name. side: "reference" or "candidate"."""
        run, call_of = runner.reference, runner.reference_call
        if side == "candidate":
            run, call_of = runner.candidate, runner.candidate_call
        found: dict[str, Examples] = {}
        of_outputs = [metric for metric in self.metrics if isinstance(metric, OutputMetric)]
        for number, batch in enumerate(self.data.batches if of_outputs else ()):
            on_progress(f"{side}, {', '.join(metric.name for metric in of_outputs)}", number, len(self.data.batches))
            output, given = _for_users(run(call_of(batch)).output), _for_users(batch.named(self.model.module))
            for metric in of_outputs:
                with failures_as(UserError, f"{metric.name} failed", with_line(metric.file)):
                    returned = metric.function(output, given)
                    values = _values(metric.name, returned, metric.aggregate)
                examples = found.setdefault(metric.name, Examples(aggregate=metric.aggregate))
                examples.values.extend(values)
                examples.epsilon = max(examples.epsilon, epsilon_of(returned))
        for each in self.metrics:
            if isinstance(each, ModelMetric):
                on_progress(f"{side}, {each.name}", 0, 1)
                found.update(run(partial(_guarded, each, self.model, self.data)).output)
        return found


def _guarded(metric: ModelMetric, model: LiveModel, data: Inputs) -> Mapping[str, Examples]:
    with failures_as(UserError, f"{metric.name} failed", with_line(metric.file)):
        return metric.function(model, data)


def _for_users(value: Any) -> Any:
    """Return a value with its tensors on the CPU, and with floats widened to float32 or float64, which NumPy knows, too."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        wide = tensor.float() if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor
        return wide.detach().cpu()

    return with_tensors(value, moved)


def _values(name: str, returned: Any, aggregate: Aggregate | None) -> list[Any]:
    """Convert what a metric returned to a list of plain Python values, one for each example. Each entry of a list, or of the first
    dimension of a tensor or an array, is an example. Anything else is the value of a single example. Raises UserError if the values
    are not numbers and there is no `aggregate`.
    """
    plain = _plain(returned)
    values = plain if isinstance(plain, list) else [plain]
    wrong = [each for each in values if not isinstance(each, (int, float))] if aggregate is None else []
    if wrong:
        raise UserError(
            f"{name} returned {printable(repr(wrong[0]), 100)} for an example, which is no number: return a number for each "
            "example, or give the function an attribute `aggregate`, a function that computes the metric from such values"
        )
    return values


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(map(_plain, value))
    return {key: _plain(item) for key, item in value.items()} if type(value) is dict else value
