"""Casts one weight after the other to a wider dtype in the same memory, so that not every weight needs new memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from itertools import accumulate

import torch

from dtype_engine.runtime.model.live import Weight

_WORTH_SHARING = 1 << 20
"""A weight that is cast to a wider dtype goes into the reused memory if it has at least this many bytes. Smaller allocations are
cheap, since they need no call to the operating system.
"""
_ALIGNMENT = 64


class WidenedWeights:
    """Casts the large weights of a forward pass to a wider dtype in the same memory, one operation after the other. Use it on a
    CPU, for operations that keep no reference to their arguments.

    New memory for each weight would lengthen a matrix product by up to a third. (24 products [150, 896] x [896, 4864] take 296 ms
    with new memory and 220 ms with reused memory; 2 cores, AMD EPYC.)

    dtype_of: returns the wider dtype for a weight.
    """

    def __init__(self, dtype_of: Callable[[Weight], torch.dtype]) -> None:
        self._dtype_of = dtype_of
        self._memory = torch.empty(0, dtype=torch.uint8)

    def values(self, weights: Collection[Weight], value_of: Callable[[Weight], torch.Tensor]) -> list[torch.Tensor]:
        """Return the weights of one operation in their wider dtype. Large ones are in the reused memory, which the next call
        overwrites. Others are computed by `value_of`.
        """
        shared = [weight for weight in weights if self._is_worth_sharing(weight)]
        sizes = [-(-self._nbytes(weight) // _ALIGNMENT) * _ALIGNMENT for weight in shared]
        if sum(sizes) > len(self._memory):
            self._memory = torch.empty(0, dtype=torch.uint8)  # free the old memory before allocating the new one
            self._memory = torch.empty(sum(sizes), dtype=torch.uint8)
        places = dict(zip(map(id, shared), accumulate(sizes, initial=0), strict=False))
        values = []
        for weight in weights:
            if (start := places.get(id(weight))) is None:
                values.append(value_of(weight))
            else:
                memory = self._memory[start : start + self._nbytes(weight)].view(self._dtype_of(weight))
                values.append(memory.view(weight.reference.shape).copy_(weight.reference.read()))
        return values

    def _nbytes(self, weight: Weight) -> int:
        return math.prod(weight.reference.shape) * self._dtype_of(weight).itemsize

    def _is_worth_sharing(self, weight: Weight) -> bool:
        values = weight.reference
        return (
            not values.format
            and values.dtype != self._dtype_of(weight)
            and (not values.plain or (values.tensors[0].device.type == "cpu" and values.tensors[0].is_contiguous()))
            and self._nbytes(weight) >= _WORTH_SHARING
        )
