"""Finds the weights of operations whose output dtype the model's code reads. In 16 bits, such a weight also affects other
operations than its own.

For example, a Llama computes the cosines and sines of positions (RoPE) in the dtype of the embeddings' output. Local errors do not
include this effect, so these few weights are measured in the 16-bit dtypes by separate passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from dtype_engine.runtime.model.live import Weight
from dtype_engine.runtime.modes.op_tables import Arguments
from dtype_engine.runtime.modes.reference import ReferenceMode
from dtype_engine.runtime.numerics.quantize import torch_dtype
from dtype_engine.runtime.scan.local_errors import PRODUCTS, summed_in_float32

SIXTEEN_BITS = ("bfloat16", "float16")
MOST = 2
"""Maximum number of weights to measure by separate passes: those whose output dtype is read first. Each needs a pass per dtype."""


def weights_to_measure(
    read: Iterable[str], wanted: Mapping[str, Sequence[str]], sequence: int, sequences: int
) -> list[tuple[str, str]]:
    """Return the (weight, dtype) pairs to measure by separate passes in the sequence number `sequence`.

    read: the weights of operations whose output dtype was read, in the order of the pass. If there are enough sequences, they take
    turns: each measures one pair, and one sequence in every round measures none, so that the average is below one pass per
    sequence. wanted: the dtypes in which each weight is scored.
    """
    few = [name for name in dict.fromkeys(read) if name in wanted][:MOST]
    keys = [(name, dtype) for name in few for dtype in wanted[name] if dtype in SIXTEEN_BITS]
    if not keys or sequences < 2 * (len(keys) + 1):
        return keys
    turn = sequence % (len(keys) + 1)
    return keys[turn : turn + 1]


class SingleWeightCastMode(ReferenceMode):
    """Runs the reference with one weight cast to a dtype that torch computes in, as if a recipe cast only this weight."""

    def __init__(self, weights: Mapping[int, Weight], device: torch.device, name: str, dtype: str) -> None:
        super().__init__(weights, device)
        self.name = name
        key, weight = next((key, weight) for key, weight in weights.items() if weight.info.name == name)
        self.value = weight.original.to(device).to(torch_dtype(dtype), copy=True)
        self.replaced.add(key)

    def dtype_of(self, weight: Weight) -> torch.dtype:
        return self.value.dtype if weight.info.name == self.name else super().dtype_of(weight)

    def value_of(self, weight: Weight, dtype: torch.dtype | None) -> torch.Tensor:
        return self.value if weight.info.name == self.name else super().value_of(weight, dtype)

    def rows_of(self, weight: Weight, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids, self.value) if weight.info.name == self.name else super().rows_of(weight, ids)

    def run(self, func: Any, name: str, args: Arguments, kwargs: dict[str, Any]) -> Any:
        if self.device.type == "cpu" and name in PRODUCTS:
            func = summed_in_float32(func)
        return super().run(func, name, args, kwargs)
