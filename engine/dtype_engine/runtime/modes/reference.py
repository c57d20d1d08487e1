"""Runs the reference model: the stored weights, each widened to float32 when it is used, without a second copy of the model.

If drift is measured from the model as stored, the weights are not widened, but stay in their stored dtypes. Codes are then decoded
in the same way as in a candidate run, so that a model in which no weight is cast equals its reference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from dtype_engine.core.options import STORED
from dtype_engine.core.text import printable
from dtype_engine.runtime.formats.dequantize import dtype_name
from dtype_engine.runtime.model.live import LiveModel, Weight
from dtype_engine.runtime.modes.weight_mode import WeightMode
from dtype_engine.runtime.modes.widening_buffer import WidenedWeights
from dtype_engine.search.sensitivity import is_lossless

_MOST_NAMED = 3
"""Maximum number of stored dtypes in the name of the reference model."""
_KEEPS_NO_ARGUMENT = frozenset({"linear", "conv1d", "conv2d", "conv3d"})
"""Operations whose result never shares memory with an argument. The memory of a weight that was cast to float32 for such an
operation can be reused right after it.
"""


class ReferenceMode(WeightMode):
    """The torch-function mode for reference runs. A weight that the module holds in another dtype is widened (cast to float32) for
    each operation that uses it. If drift is measured from the model as stored, no weight is widened.

    Weights stored in float64 stay in float64. An embedding look-up widens only the selected rows.

    widened: memory that large widened weights use one after the other, on a CPU without gradients. Each weight overwrites the
    previous one, so no other mode may keep the tensors that it sees. If None, each widened weight gets new memory. compute: the
    dtype to which stored codes are decoded for an operation without an activation, such as an embedding look-up, if no weight is
    widened.
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
        return reference_rows(weight, ids, weight.tensor.device, self.compute)

    def part_of(self, weight: Weight, index: int) -> torch.Tensor | None:
        return reference_part(weight, index)

    def is_quantized(self, weight: Weight) -> bool:
        return is_coded(weight)


def is_coded(weight: Weight) -> bool:
    """Return whether a reference run uses this weight as codes. This is so if drift is measured from the model as stored, and the
    files store the weight as codes in a format of this program. Each operation then decodes it to the dtype of its activation.
    """
    return weight.as_stored and weight.reference.own


def holds_reference(weight: Weight) -> bool:
    """Return whether the module already holds a weight with the values and the dtype of the reference, so that a reference run need
    not replace it.
    """
    values = weight.reference
    if not weight.info.castable and values.plain and weight.other_reference is None:
        return True
    held = not weight.differs or weight.stashed is not None
    return held and values.plain and values.dtype == reference_dtype(weight)


def copied_bytes(model: LiveModel) -> int:
    """Return how many bytes the weights take that a reference run widens or decodes, if it holds all of these copies at once."""
    copied = (weight for weight in model.weights.values() if not holds_reference(weight))
    return sum(weight.info.numel * reference_dtype(weight).itemsize for weight in copied)


def reference_dtype(weight: Weight) -> torch.dtype:
    """Return the dtype in which a reference run uses a weight: float64 if it is stored in float64, otherwise float32.

    If drift is measured from the model as stored, it is the stored dtype instead. For a weight that another program quantized, it
    is then the dtype that this weight would have in an unquantized model.
    """
    if weight.as_stored and not is_coded(weight):
        return weight.reference.held(torch.device("cpu")).dtype
    return torch.float64 if weight.reference.dtype == torch.float64 else torch.float32


def reference_value(weight: Weight, device: torch.device, of_codes: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the values with which a reference run uses a weight, in its `reference_dtype` and on `device`. of_codes: the dtype of
    the result for a weight that the reference run uses as codes (`is_coded`).
    """
    return weight.reference.read(device).to(of_codes if is_coded(weight) else reference_dtype(weight))


def reference_part(weight: Weight, index: int) -> torch.Tensor | None:
    """Return the values with which a reference run uses a weight at one index of its first dimension, such as those of one expert.
    Returns None if they can't be read without the others.
    """
    part = None if is_coded(weight) else weight.reference.part(index, weight.tensor.device)
    return None if part is None else part.to(reference_dtype(weight))


def reference_rows(
    weight: Weight, ids: torch.Tensor, device: torch.device, of_codes: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return rows of an embedding table [rows, width] as a reference run uses them: [*ids.shape, width]. ids: the indexes of the
    rows. of_codes: the dtype of the result if the reference run uses the table as codes (`is_coded`).
    """
    dtype = of_codes if is_coded(weight) else reference_dtype(weight)
    return weight.reference.gather(ids.to(device)).to(dtype)


def equals_reference(weight: Weight, dtype: str) -> bool:
    """Return whether casting a weight to `dtype` causes no drift, since its values and arithmetic stay those of the
    reference run.
    """
    if weight.other_reference is not None:
        return False
    return dtype == weight.info.dtype if weight.as_stored else is_lossless(weight.info.dtype, dtype)


def reference_name(model: LiveModel) -> str:
    """Return the name of the reference model for reports. This is the dtype in which it computes, such as "float32". For the model
    as stored, it is a text such as "as stored (bfloat16, float32)", in which the dtypes with the most bytes come first. For another
    checkpoint, it is its path or name.
    """
    if model.reference == STORED:
        sizes: dict[str, int] = {}
        for tensor in model.tree.tensors.values():
            if tensor.counted:
                sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
        named = [name for name in sorted(sizes, key=lambda name: -sizes[name]) if sizes[name]]
        more = ", ..." if len(named) > _MOST_NAMED else ""
        return f"as stored ({', '.join(named[:_MOST_NAMED])}{more})"
    if model.reference:
        return printable(model.reference, 300)
    stored = {weight.reference.dtype for weight in model.weights.values() if weight.info.castable}
    return dtype_name(torch.float64 if torch.float64 in stored else torch.float32)
