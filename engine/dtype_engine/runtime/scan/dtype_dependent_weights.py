"""Finds the weights of operations whose output dtype the model's code reads. In 16 bits, such a weight also affects other
operations than its own.

For example, a Llama computes the cosines and sines of positions (RoPE) in the dtype of the embeddings' output. Local errors do not
include this effect, so these few weights are measured in the 16-bit dtypes by separate passes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
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
"""Maximum number of dtype-dependent weights to measure: those read first in a pass. Each needs one pass per dtype."""


def weights_to_measure(
    read: Iterable[str], wanted: Mapping[str, Sequence[str]], sequence: int, sequences: int
) -> list[tuple[str, str]]:
    """Return the (weight, dtype) pairs to measure by separate passes in a sequence.

    read: the weights of operations whose output dtype was read, in the order of the pass. If there are enough sequences, each
    sequence measures at most one pair, in turn. One sequence in each round measures none, so the average cost is below one pass per
    sequence.
    """
    few = [name for name in dict.fromkeys(read) if name in wanted][:MOST]
    keys = [(name, dtype) for name in few for dtype in wanted[name] if dtype in SIXTEEN_BITS]
    if not keys or sequences < 2 * (len(keys) + 1):
        return keys
    turn = sequence % (len(keys) + 1)
    return keys[turn : turn + 1]


class WeightsCastMode(ReferenceMode):
    """Runs the reference with a few weights in a compute dtype, exactly like the candidate of a recipe that casts only these."""

    def __init__(self, weights: Mapping[int, Weight], device: torch.device, names: Collection[str], dtype: str) -> None:
        super().__init__(weights, device)
        cast = {key: weight for key, weight in weights.items() if weight.info.name in names}
        self.values = {
            weight.info.name: weight.original.to(device).to(torch_dtype(dtype), copy=True) for weight in cast.values()
        }
        self.replaced.update(cast)

    def dtype_of(self, weight: Weight) -> torch.dtype:
        value = self.values.get(weight.info.name)
        return super().dtype_of(weight) if value is None else value.dtype

    def value_of(self, weight: Weight, dtype: torch.dtype | None) -> torch.Tensor:
        value = self.values.get(weight.info.name)
        return super().value_of(weight, dtype) if value is None else value

    def rows_of(self, weight: Weight, ids: torch.Tensor) -> torch.Tensor:
        value = self.values.get(weight.info.name)
        return super().rows_of(weight, ids) if value is None else functional.embedding(ids, value)

    def run(self, func: Any, name: str, args: Arguments, kwargs: dict[str, Any]) -> Any:
        if self.device.type == "cpu" and name in PRODUCTS:
            func = summed_in_float32(func)
        return super().run(func, name, args, kwargs)
