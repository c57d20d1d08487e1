"""The noise floor of drift: how far two reference runs differ if they add the same numbers in a different order.

A different attention kernel or batch size changes the last bits of float32 results. If the drift of a candidate is not above the
noise floor, the candidate can't be distinguished from the reference.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import UserError
from dtype_engine.core.options import ClassesDim, RunSettings
from dtype_engine.results.attribution import NoiseFloor
from dtype_engine.results.drift import OutputDrift
from dtype_engine.results.figures import FIGURES
from dtype_engine.runtime.inputs import Batch, Inputs
from dtype_engine.runtime.libraries.hf_private import other_attention
from dtype_engine.runtime.model.containers import with_tensors
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.numerics.compare.metrics import OutputMetrics, compared_rows
from dtype_engine.runtime.passes.class_dimensions import classes_dimension
from dtype_engine.runtime.passes.kept_positions import KeptPositions
from dtype_engine.runtime.passes.model_behavior import ModelBehavior
from dtype_engine.runtime.passes.outputs import main_output
from dtype_engine.runtime.passes.runner import ForwardRunner

ENOUGH_POSITIONS = 256
"""The noise floor is measured over as many batches as it needs to compare this many output rows, such as tokens."""
_SAME_ROWS = 1e-2
_MORE_THAN_ROUNDING = 1e-3
"""A relative difference (60 dB) that most rows do not reach if float32 numbers are only added in another order."""
_RUNS = 4
"""How many runs the progress counts for each batch: the reference, another attention, and two for a batch of two."""


def measure_noise_floor(
    model: LiveModel,
    inputs: Inputs,
    behavior: ModelBehavior,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    cancelled: IsCancelled = never,
    classes_dim: ClassesDim = "auto",
) -> NoiseFloor:
    """Return the noise floor: the largest differences between the reference run and two variants of it, one with a different
    attention implementation and one with each input twice in a batch. Variants that the model does not support are skipped.

    behavior: what earlier passes have shown about the model. classes_dim: as in `RunSettings`. `on_progress(done, total)` is called
    with the numbers of finished runs and of all runs, each on one input; `total` is an estimate. Raises NoForward if the reference
    run fails.
    """
    comparisons: dict[str, OutputMetrics] = {}
    positions = 0
    with ForwardRunner(model, RunSettings(), cancelled, watch=False, behavior=behavior) as runner:
        for number, batch in enumerate(inputs.batches):
            expected = _expected(number, positions, len(inputs.batches))
            on_progress(_RUNS * number, _RUNS * expected)
            ran = runner.reference(runner.reference_call(batch))
            name, reference = main_output(ran.output)
            reference = reference.detach().clone()
            dimension = classes_dimension(model.module, name, reference, classes_dim)
            masks = KeptPositions.of(model.module, batch, model.device, ran.attended)
            kept = None if masks is None else masks.of_main(name, reference)
            on_progress(_RUNS * number + 1, _RUNS * expected)
            # A copy of `behavior`, because a variant that fails must not change the known facts.
            other = ForwardRunner(model, RunSettings(), cancelled, watch=False, behavior=copy.deepcopy(behavior))
            for run, (variant, again) in enumerate(_variants(other, batch, reference), start=1):
                on_progress(_RUNS * number + run + 1, _RUNS * expected)
                if again is not None:
                    comparison = comparisons.setdefault(variant, OutputMetrics(dimension))
                    comparison.add(reference, again, kept=kept)
            positions += len(compared_rows(reference, dimension, kept))
            if positions >= ENOUGH_POSITIONS:
                break
    return _worst({variant: comparison.result() for variant, comparison in comparisons.items()}, positions)


def _expected(done: int, positions: int, batches: int) -> int:
    return batches if not positions else min(batches, max(done + 1, math.ceil(ENOUGH_POSITIONS * done / positions)))


def _worst(drifts: dict[str, OutputDrift], positions: int) -> NoiseFloor:
    worst = {"sqnr_db": 0.0, "max_abs": 0.0, "rel_l2": 0.0}
    for name in (*worst, "kl_mean", "top1_agreement"):
        figure = FIGURES[name]
        values = [value for drift in drifts.values() if (value := figure.of(drift)) is not None]
        if values:
            worst[name] = max(values) if figure.better == "less" else min(values)
    return NoiseFloor(tuple(drifts), positions, **worst)


def _variants(
    runner: ForwardRunner, batch: Batch, reference: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Run variants of the reference. Yields (name, main output or None if it fails). reference: the reference run's main output."""
    with other_attention(runner.model.module) as attention:
        yield f"{attention} attention", _attempt(runner, batch, reference, 1) if attention else None
    yield "batch of two", _attempt(runner, Batch(_twice(batch.args), _twice(batch.kwargs)), reference, 2)


def _attempt(runner: ForwardRunner, batch: Batch, reference: torch.Tensor, times: int) -> torch.Tensor | None:
    """Run the reference on `batch`, in which each input occurs `times` times. Returns the main output for the first copy, or None
    if the run fails, if the copies have different outputs, or if most rows differ from `reference` by more than rounding.
    reference: the main output for the inputs without repetition.
    """
    try:
        output = main_output(runner.reference(runner.reference_call(batch)).output)[1]
    except (UserError, RuntimeError, ValueError, TypeError, IndexError):
        return None
    if reference.ndim == 0 or output.shape != (times * reference.shape[0], *reference.shape[1:]):
        return None
    parts = output.chunk(times)
    # If the first dimension is time instead of the batch, the second part differs from the first.
    if any(not torch.allclose(part, parts[0], _SAME_ROWS, _SAME_ROWS, equal_nan=True) for part in parts[1:]):
        return None
    return None if times > 1 and _is_other_arithmetic(reference, parts[0]) else parts[0]


def _is_other_arithmetic(reference: torch.Tensor, again: torch.Tensor) -> bool:
    """Return whether most rows of `again` differ from those of `reference` by more than rounding. A batch of two then does not
    repeat the reference, because the examples of a batch affect each other, for example through a norm of the whole batch. A few
    differing rows do not count: a router may send a token elsewhere because of the last bit.
    """
    size, difference = (torch.linalg.vector_norm(each, dim=-1) for each in (reference, again - reference))
    return float((difference > _MORE_THAN_ROUNDING * size).float().mean()) > 0.5


def _twice(value: Any) -> Any:
    return with_tensors(value, lambda tensor: torch.cat([tensor, tensor]) if tensor.ndim else tensor)
