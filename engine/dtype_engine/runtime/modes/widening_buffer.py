"""Memory for weights that are widened to be used, in the place of new memory for each."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import accumulate

import torch

from dtype_engine.runtime.model.live import Weight

_WORTH_SHARING = 1 << 20
"""Bytes. Below, memory is given out again without asking the kernel for it."""
_ALIGNMENT = 64


class WidenedWeights:
    """Large weights in the dtype of the reference, for one pass: each is widened into the same memory, one operation after another.
    On a CPU, for operations that hold no argument.

    Memory that is new for each costs as much as a third of the product (24 times [150, 896] x [896, 4864]: 296 ms, 220 ms with
    shared memory; 2 cores, AMD EPYC).

    dtype_of: what a weight is widened to.
    """

    def __init__(self, dtype_of: Callable[[Weight], torch.dtype]) -> None:
        self._dtype_of = dtype_of
        self._memory = torch.empty(0, dtype=torch.uint8)

    def values(self, weights: Collection[Weight], value_of: Callable[[Weight], torch.Tensor]) -> list[torch.Tensor]:
        """As `value_of` gives them, which is asked for all small ones. Large ones last until the next call."""
        shared = [weight for weight in weights if self._is_worth_sharing(weight)]
        sizes = [-(-self._nbytes(weight) // _ALIGNMENT) * _ALIGNMENT for weight in shared]
        if sum(sizes) > len(self._memory):
            self._memory = torch.empty(0, dtype=torch.uint8)  # freed before the next is taken
            self._memory = torch.empty(sum(sizes), dtype=torch.uint8)
        places = dict(zip(map(id, shared), accumulate(sizes, initial=0), strict=False))
        values = []
        for weight in weights:
            if (start := places.get(id(weight))) is None:
                values.append(value_of(weight))
            else:
                memory = self._memory[start : start + self._nbytes(weight)].view(self._dtype_of(weight))
                values.append(memory.view(weight.original.shape).copy_(weight.original))
        return values

    def _nbytes(self, weight: Weight) -> int:
        return weight.original.numel() * self._dtype_of(weight).itemsize

    def _is_worth_sharing(self, weight: Weight) -> bool:
        """Whether a weight is widened at all, by values alone, into what is laid out as it is."""
        stored = weight.original
        return (
            weight.stored_scale is None
            and stored.dtype != self._dtype_of(weight)
            and stored.device.type == "cpu"
            and stored.is_contiguous()
            and self._nbytes(weight) >= _WORTH_SHARING
        )
