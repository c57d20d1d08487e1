"""Runs the reference model: the stored weights, each widened to float32 when it is used, without a second copy of the model.

If drift is measured from the model as stored, the weights are not widened, but stay in their stored dtypes. Codes are then decoded
in the same way as in a candidate run, so that a model in which no weight is cast equals its reference.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import torch

from dtype_engine.core.options import STORED
from dtype_engine.core.text import printable
from dtype_engine.runtime.formats.dequantize import dtype_name
from dtype_engine.runtime.model.live import LiveModel
from dtype_engine.runtime.model.weight import Weight
from dtype_engine.runtime.modes.weight_mode import WeightMode
from dtype_engine.search.sensitivity import is_lossless

_MOST_NAMED = 3
"""Maximum number of stored dtypes in the name of the reference model."""
_KEEPS_NO_ARGUMENT = frozenset({"linear", "conv1d", "conv2d", "conv3d"})
"""Operations whose result shares no memory with an argument, so that a widened weight's memory can be reused after them."""
_WORTH_SHARING = 1 << 20
"""A widened weight goes into the reused memory if it has at least this many bytes. Smaller allocations are cheap, since they need
no call to the operating system.
"""
_ALIGNMENT = 64


class ReferenceMode(WeightMode):
    """The torch-function mode for reference runs. A weight that the module holds in another dtype is widened (cast to float32) for
    each operation that uses it. If drift is measured from the model as stored, no weight is widened.

    Weights stored in float64 stay in float64. An embedding look-up widens only the selected rows.

    widened: memory to reuse for large widened weights. It is used only on a CPU without gradients, and has to be None if another
    mode keeps the tensors that it sees. If None, each widened weight gets new memory. compute: the dtype to which stored codes are
    decoded for an operation without an activation, such as an embedding look-up, if no weight is widened.
    """

    def __init__(
        self,
        weights: Mapping[int, Weight],
        device: torch.device,
        widened: WidenedWeights | None = None,
        compute: torch.dtype = torch.float32,
    ) -> None:
        replaced = (key for key, weight in weights.items() if not holds_reference(weight))
        super().__init__(weights, device, replaced, compute)
        self.widened = widened if device.type == "cpu" else None

    def like_reference(self, module: str) -> bool:
        return True

    def dtype_of(self, weight: Weight) -> torch.dtype:
        return self.compute if is_coded(weight) else reference_dtype(weight)

    def value_of(self, weight: Weight, dtype: torch.dtype | None) -> torch.Tensor:
        return reference_value(weight, weight.tensor.device, dtype or self.compute)

    def values_of(self, weights: Sequence[Weight], dtype: torch.dtype | None, name: str) -> list[torch.Tensor]:
        if self.widened is not None and name in _KEEPS_NO_ARGUMENT and not torch.is_grad_enabled():
            return self.widened.values(weights, lambda weight: self.value_of(weight, dtype))
        return super().values_of(weights, dtype, name)

    def rows_of(self, weight: Weight, ids: torch.Tensor) -> torch.Tensor:
        return weight.reference.gather(ids.to(weight.tensor.device)).to(self.dtype_of(weight))

    def part_of(self, weight: Weight, index: int) -> torch.Tensor | None:
        return reference_part(weight, index)

    def is_quantized(self, weight: Weight) -> bool:
        return is_coded(weight)


class WidenedWeights:
    """Widens the large weights of a forward pass in the same memory, one operation after the other. Use it on a CPU, for operations
    that keep no reference to their arguments.

    New memory for each weight would lengthen a matrix product by up to a third. (24 products [150, 896] x [896, 4864] take 296 ms
    with new memory and 220 ms with reused memory; 2 cores, AMD EPYC.)
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def values(self, weights: Sequence[Weight], value_of: Callable[[Weight], torch.Tensor]) -> list[torch.Tensor]:
        """Return the weights of one operation in their `reference_dtype`. Large weights are in the reused memory, which the next
        call overwrites. Other weights are computed by `value_of`.
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
                memory = self._memory[start : start + self._nbytes(weight)].view(reference_dtype(weight))
                values.append(memory.view(weight.reference.shape).copy_(weight.reference.read()))
        return values

    def _nbytes(self, weight: Weight) -> int:
        return math.prod(weight.reference.shape) * reference_dtype(weight).itemsize

    def _is_worth_sharing(self, weight: Weight) -> bool:
        values = weight.reference
        return (
            not values.format
            and values.dtype != reference_dtype(weight)
            and (not values.plain or (values.tensors[0].device.type == "cpu" and values.tensors[0].is_contiguous()))
            and self._nbytes(weight) >= _WORTH_SHARING
        )


def is_coded(weight: Weight) -> bool:
    """Return whether a reference run uses a weight as codes, which each operation decodes to the dtype of its activation: drift is
    measured from the model as stored, and the files store the weight in a format of this program.
    """
    return weight.as_stored and weight.reference.own


def holds_reference(weight: Weight) -> bool:
    """Return whether the module already holds a weight with the values and the dtype of the reference."""
    values = weight.reference
    if not weight.info.castable and values.plain and weight.other_reference is None:
        return True
    held = not weight.differs or weight.stashed is not None
    return held and values.plain and values.dtype == reference_dtype(weight)


def copied_bytes(model: LiveModel) -> int:
    """Return the bytes of all weights that a reference run widens or decodes, if it holds all of these copies at once."""
    copied = (weight for weight in model.weights.values() if not holds_reference(weight))
    return sum(weight.info.numel * reference_dtype(weight).itemsize for weight in copied)


def reference_dtype(weight: Weight) -> torch.dtype:
    """Return the dtype in which a reference run uses a weight: float64 if it is stored in float64, otherwise float32.

    If drift is measured from the model as stored, return the stored dtype or, for a weight that another program quantized, the
    dtype that this weight would have in an unquantized model.
    """
    if weight.as_stored and not is_coded(weight):
        return weight.reference.held(torch.device("cpu")).dtype
    return torch.float64 if weight.reference.dtype == torch.float64 else torch.float32


def reference_value(weight: Weight, device: torch.device, of_codes: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the values of a weight in a reference run, in its `reference_dtype`, or in `of_codes` if the weight `is_coded`."""
    return weight.reference.read(device).to(of_codes if is_coded(weight) else reference_dtype(weight))


def reference_part(weight: Weight, index: int) -> torch.Tensor | None:
    """Return `reference_value` at one index of the first dimension, or None if the values at this index can't be read alone."""
    part = None if is_coded(weight) else weight.reference.part(index, weight.tensor.device)
    return None if part is None else part.to(reference_dtype(weight))


def equals_reference(weight: Weight, dtype: str) -> bool:
    """Return whether a weight cast to `dtype` causes no drift, since it has the values and the arithmetic of the reference run."""
    if weight.other_reference is not None:
        return False
    return dtype == weight.info.dtype if weight.as_stored else is_lossless(weight.info.dtype, dtype)


def reference_name(model: LiveModel) -> str:
    """Return the name of the reference model for reports: the dtype in which it computes, such as "float32"; for the model as
    stored, a text such as "as stored (bfloat16, float32)", the dtypes with the most bytes first; or another checkpoint's name.
    """
    if model.reference == STORED:
        sizes = Counter[str]()
        for tensor in model.tree.tensors.values():
            if tensor.counted:
                sizes[tensor.dtype] += tensor.nbytes
        named = [name for name, nbytes in sizes.most_common() if nbytes]
        more = ", ..." if len(named) > _MOST_NAMED else ""
        return f"as stored ({', '.join(named[:_MOST_NAMED])}{more})"
    if model.reference:
        return printable(model.reference, 300)
    stored = {weight.reference.dtype for weight in model.weights.values() if weight.info.castable}
    return dtype_name(torch.float64 if torch.float64 in stored else torch.float32)
