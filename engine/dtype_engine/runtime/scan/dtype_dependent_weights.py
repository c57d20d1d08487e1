"""Weights whose output dtype is read by the model's code. In 16 bits, such a weight affects more than its own operation.

For example, a Llama computes the cosines and sines of positions (RoPE) in the dtype of the embeddings' output. Local errors do not
include this effect, so these few weights are measured in the 16-bit dtypes by separate passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from dtype_engine.runtime.model.live import Weight
from dtype_engine.runtime.modes.mixed import MixedDtypeMode
from dtype_engine.runtime.modes.op_tables import Arguments, call_torch, replace_tensors, tensors_in
from dtype_engine.runtime.modes.reference import ReferenceMode
from dtype_engine.runtime.numerics.quantize import torch_dtype
from dtype_engine.runtime.scan.local_errors import PRODUCTS, summed_in_float32

SIXTEEN_BITS = ("bfloat16", "float16")
MOST = 2
"""Maximum number of dtype-dependent weights to measure, the first ones of a pass. Each needs one pass per dtype."""


def weights_to_measure(
    read: Iterable[str], wanted: Mapping[str, Sequence[str]], sequence: int, sequences: int
) -> list[tuple[str, str]]:
    """Return the (weight, dtype) pairs to measure by separate passes in a sequence.

    read: the weights whose output dtype was read, in the order of the pass. If there are enough sequences, each sequence measures
    at most one pair, in turn. One sequence in each round measures none, so the average cost is below one pass per sequence.
    """
    few = [name for name in dict.fromkeys(read) if name in wanted][:MOST]
    keys = [(name, dtype) for name in few for dtype in wanted[name] if dtype in SIXTEEN_BITS]
    if not keys or sequences < 2 * (len(keys) + 1):
        return keys
    turn = sequence % (len(keys) + 1)
    return keys[turn : turn + 1]


class SingleWeightCastMode(ReferenceMode):
    """Runs the reference with one weight in a compute dtype, exactly like the candidate of a recipe that casts only this weight."""

    def __init__(self, weights: Mapping[int, Weight], device: torch.device, name: str, dtype: str) -> None:
        super().__init__(weights, device)
        self.name = name
        weight = next(weight for weight in weights.values() if weight.info.name == name)
        self.value = weight.original.to(device).to(torch_dtype(dtype), copy=True)
        self.own = {id(self.value): Weight(weight.info, self.value, self.value, dtype)}
        self.rules = MixedDtypeMode(self.own, torch.float32, device)

    def dtype_of(self, weight: Weight) -> torch.dtype:
        return self.value.dtype if weight.info.name == self.name else super().dtype_of(weight)

    def value_of(self, weight: Weight) -> torch.Tensor:
        return self.value if weight.info.name == self.name else super().value_of(weight)

    def run(self, func: Any, name: str, args: Arguments, kwargs: dict[str, Any]) -> Any:
        tensors = tensors_in(args, kwargs)
        values: dict[int, torch.Tensor] = {}
        known = dict(self.own)  # other weights matter too: of several weights, the largest dtype decides
        for tensor in tensors:
            weight = self.weight_of(tensor)
            if weight is not None:
                value = values[id(tensor)] = self.value_of(weight)
                if value is not self.value:
                    known[id(value)] = Weight(weight.info, value, value, "float32")
        if self.device.type == "cpu" and name in PRODUCTS:
            func = summed_in_float32(func)
        if not values and len({tensor.dtype for tensor in tensors if tensor.is_floating_point()}) < 2:
            return call_torch(
                func, name, args, kwargs, self
            )  # most operations have one dtype, so the rules change nothing
        args, kwargs = replace_tensors(args, kwargs, values)
        self.rules.module, self.rules.weights = self.module, known
        return self.rules.run(func, name, args, kwargs)
