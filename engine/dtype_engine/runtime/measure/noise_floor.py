"""The floor of a drift: how far the reference is from itself when its sums are taken in another order.

The same float32 arithmetic gives other last bits under another attention kernel or batch size. A candidate that drifts
no more than that is not told from the reference, whatever its figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from dtype_engine.core.cancellation import IsCancelled, never
from dtype_engine.core.errors import UserError
from dtype_engine.core.options import RunSettings
from dtype_engine.results.attribution import NoiseFloor
from dtype_engine.results.drift import OutputDrift
from dtype_engine.runtime.inputs import Batch, Inputs
from dtype_engine.runtime.measure.comparison import is_distribution
from dtype_engine.runtime.model.hf_private import other_attention
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.numerics.metrics import OutputComparison
from dtype_engine.runtime.passes.outputs import main_output
from dtype_engine.runtime.passes.runner import ForwardRunner

ENOUGH_POSITIONS = 256
"""Batches are taken until this many rows of output were compared: the floor needs no more text than that."""
_SAME_ROWS = 1e-2


def measure_floor(
    model: LiveModel,
    inputs: Inputs,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    cancelled: IsCancelled = never,
) -> NoiseFloor:
    """Run the reference as it is, with the other attention implementation (eager for sdpa), and with every input twice in
    one batch, and compare. Ways that the model does not have are left out. Raises NoForward when the reference fails.
    """
    found: dict[str, OutputComparison] = {}
    positions = 0
    with ForwardRunner(model, RunSettings(), cancelled, watch=False) as passes:
        for batch in inputs.batches:
            on_progress(positions, ENOUGH_POSITIONS)
            name, reference = main_output(_run(passes, batch))
            reference = reference.detach().clone()
            needed_rules = set(model.requires_mixed_mode)
            for way, again in _ways(passes, batch, reference):
                if again is not None:
                    comparison = found.setdefault(way, OutputComparison(is_distribution(name, reference)))
                    comparison.add(reference, again)
            # A way that failed says nothing about the reference itself.
            model.requires_mixed_mode &= needed_rules
            positions += reference[..., 0].numel() if reference.ndim else 1
            if positions >= ENOUGH_POSITIONS:
                break
    return _worst({way: comparison.result() for way, comparison in found.items()}, positions)


def _worst(found: dict[str, OutputDrift], positions: int) -> NoiseFloor:
    if not found:
        return NoiseFloor((), positions, 0.0, 0.0, 0.0)
    outputs = list(found.values())
    kl = [output.kl_mean for output in outputs if output.kl_mean is not None]
    top = [output.top1_agreement for output in outputs if output.top1_agreement is not None]
    return NoiseFloor(
        ways=tuple(found),
        positions=positions,
        sqnr_db=min(output.sqnr_db for output in outputs),
        max_abs=max(output.max_abs for output in outputs),
        rel_l2=max(output.rel_l2 for output in outputs),
        kl_mean=max(max(kl), 0.0) if kl else None,  # rounding in the sum over classes can leave it below zero
        top1_agreement=min(top) if top else None,
    )


def _run(passes: ForwardRunner, batch: Batch) -> Any:
    given = passes.reference_batch(batch)
    return passes.run_reference(lambda: passes.model.module(*given.args, **given.kwargs))[0]


def _ways(passes: ForwardRunner, batch: Batch, reference: torch.Tensor) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Each other way to run the reference, with its main output in the reference's shape; None where there is none."""
    with other_attention(passes.model.module) as attention:
        yield f"{attention} attention", _attempt(passes, batch, reference, 1) if attention else None
    yield "batch of two", _attempt(passes, Batch(_twice(batch.args), _twice(batch.kwargs)), reference, 2)


def _attempt(passes: ForwardRunner, batch: Batch, reference: torch.Tensor, times: int) -> torch.Tensor | None:
    """The first of `times` equal parts of the main output, None where it does not come in such parts."""
    try:
        output = main_output(_run(passes, batch))[1]
    except (UserError, RuntimeError, ValueError, TypeError, IndexError):
        return None
    if reference.ndim == 0 or output.shape != (times * reference.shape[0], *reference.shape[1:]):
        return None
    parts = output.chunk(times)
    # Where the first dimension is time and not the batch, what comes second is another output.
    if any(not torch.allclose(part, parts[0], _SAME_ROWS, _SAME_ROWS, equal_nan=True) for part in parts[1:]):
        return None
    return parts[0]


def _twice(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.cat([value, value]) if value.ndim else value
    if isinstance(value, dict):
        return {key: _twice(item) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_twice(item) for item in value)
    return value
