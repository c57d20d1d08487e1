"""Measures what the merge of an adapter loses where the merged weights are rounded to the dtype of the base model."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from dtype_engine.checkpoint import Checkpoint
from dtype_engine.checkpoint.schemes import CodedWeight, lora
from dtype_engine.core.cancellation import IsCancelled
from dtype_engine.core.errors import Cancelled
from dtype_engine.results.merge_error import MergeError
from dtype_engine.runtime.formats import schemes
from dtype_engine.runtime.formats.dequantize import torch_dtype
from dtype_engine.runtime.formats.schemes.lora import decode_base
from dtype_engine.runtime.weights.files import read_part

_CHUNK = 1 << 22
"""About how many values are merged at once."""


def merge_error(
    checkpoint: Checkpoint, cancelled: IsCancelled, on_progress: Callable[[int, int], object]
) -> MergeError | None:
    """Return the error of rounding an adapter's merged weights to the dtypes of the base, or None if the checkpoint has no adapter
    or no weight is rounded. Raises Cancelled, and UserError if a file can't be read.
    """
    weights = checkpoint.merged.weights if checkpoint.merged is not None else {}
    rounded = {
        name: weight
        for name, weight in weights.items()
        if lora.SCALE in weight.settings and weight.values_as != "float32"
    }
    sums: dict[str, tuple[float, float]] = {}
    for done, (name, weight) in enumerate(rounded.items()):
        on_progress(done, len(rounded))
        sums[name] = _sums(weight, cancelled)
    shares = {name: _relative(*each) for name, each in sums.items()}
    if not shares:
        return None
    worst = max(shares, key=lambda name: shares[name])
    return MergeError(
        dtypes=tuple(sorted({weight.values_as for weight in rounded.values()})),
        weights=len(rounded),
        relative=_relative(*map(sum, zip(*sums.values(), strict=True))),
        worst=worst,
        worst_relative=shares[worst],
    )


def _sums(weight: CodedWeight, cancelled: IsCancelled) -> tuple[float, float]:
    """Return the sums of squares of (the rounding of a merged weight, what the adapter adds), computed in float64."""
    parts = {role: read_part(part) for role, part in weight.parts.items()}
    rows = weight.shape[0]
    step = max(1, _CHUNK * rows // max(math.prod(weight.shape), 1))
    lost = added = 0.0
    for first in range(0, rows, step):
        if cancelled():
            raise Cancelled
        last = min(first + step, rows)
        merged = schemes.decode(weight, parts, first, last)
        rounding = merged.to(torch_dtype(weight.values_as)).to(torch.float64) - merged
        change = merged.to(torch.float64) - decode_base(weight, parts, first, last)
        lost += float(rounding.square().sum())
        added += float(change.square().sum())
    return lost, added


def _relative(lost: float, added: float) -> float:
    """Return the ratio of two norms from their squares. It is infinite if the adapter adds nothing and the merge still rounds."""
    if added == 0:
        return math.inf if lost else 0.0
    return math.sqrt(lost / added)
