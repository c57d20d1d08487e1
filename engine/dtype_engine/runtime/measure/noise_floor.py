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
from dtype_engine.runtime.inputs import Batch, Inputs
from dtype_engine.runtime.libraries.hf_private import other_attention
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.numerics.compare.metrics import OutputMetrics, compared_rows
from dtype_engine.runtime.passes.class_dimensions import classes_dimension
from dtype_engine.runtime.passes.kept_positions import KeptPositions
from dtype_engine.runtime.passes.model_behavior import ModelBehavior
from dtype_engine.runtime.passes.one_pass import PassResult
from dtype_engine.runtime.passes.outputs import main_output
from dtype_engine.runtime.passes.runner import ForwardRunner

ENOUGH_POSITIONS = 256
"""The noise floor is measured over as many batches as it needs to compare this many output rows, such as tokens."""
_SAME_ROWS = 1e-2
_MORE_THAN_ROUNDING = 1e-3
"""A relative difference of a row (60 dB) that is larger than those that the order of float32 sums makes in most rows."""
_RUNS = 4
"""How many runs the progress counts for each batch: one reference run, one with a different attention kernel, and two for a batch
of twice the size.
"""


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

    behavior: what earlier passes have shown about the model. classes_dim: the output dimension along which logits lie.
    `on_progress(done, total)` is called with the numbers of finished runs and of all runs, each on one input; `total` is an
    estimate. Raises NoForward if the reference run fails.
    """
    comparisons: dict[str, OutputMetrics] = {}
    positions = 0
    with ForwardRunner(model, RunSettings(), cancelled, watch=False, behavior=behavior) as runner:
        for number, batch in enumerate(inputs.batches):
            expected = _expected(number, positions, len(inputs.batches))
            on_progress(_RUNS * number, _RUNS * expected)
            ran = _run(runner, batch)
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
    if not drifts:
        return NoiseFloor((), positions, 0.0, 0.0, 0.0)
    kl = [drift.kl_mean for drift in drifts.values() if drift.kl_mean is not None]
    top = [drift.top1_agreement for drift in drifts.values() if drift.top1_agreement is not None]
    return NoiseFloor(
        ways=tuple(drifts),
        positions=positions,
        sqnr_db=min(drift.sqnr_db for drift in drifts.values()),
        max_abs=max(drift.max_abs for drift in drifts.values()),
        rel_l2=max(drift.rel_l2 for drift in drifts.values()),
        kl_mean=max(max(kl), 0.0) if kl else None,  # rounding in the sum over classes can make it negative
        top1_agreement=min(top) if top else None,
    )


def _run(runner: ForwardRunner, batch: Batch) -> PassResult[Any]:
    return runner.reference(runner.reference_call(batch))


def _variants(
    runner: ForwardRunner, batch: Batch, reference: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Rerun the reference with a different attention kernel, and with each input twice in a batch. Yields (the variant's name, its
    main output or None if the variant fails). reference: the main output of the reference run.
    """
    with other_attention(runner.model.module) as attention:
        yield f"{attention} attention", _attempt(runner, batch, reference, 1) if attention else None
    yield "batch of two", _attempt(runner, Batch(_twice(batch.args), _twice(batch.kwargs)), reference, 2)


def _attempt(runner: ForwardRunner, batch: Batch, reference: torch.Tensor, times: int) -> torch.Tensor | None:
    """Run the reference on a batch in which each input occurs `times` times. Returns the main output for the first copy, or None if
    the run fails or the copies have different outputs.

    reference: the main output for the inputs without repetition, which has the shape that the output for each copy must have.
    """
    try:
        output = main_output(_run(runner, batch).output)[1]
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
    """Return whether most rows of `again` differ from those of `reference` by more than rounding. Then the examples of a batch
    affect each other, as those do that a norm of the whole batch divides, and a batch of two is no repetition. Few rows that differ
    are no reason: a router may send a token elsewhere because of the last bit.
    """
    size, difference = (torch.linalg.vector_norm(each, dim=-1) for each in (reference, again - reference))
    return float((difference > _MORE_THAN_ROUNDING * size).float().mean()) > 0.5


def _twice(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.cat([value, value]) if value.ndim else value
    if isinstance(value, dict):
        return {key: _twice(item) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_twice(item) for item in value)
    return value
