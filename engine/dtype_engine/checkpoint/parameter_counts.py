"""Computes how many parameters of the model each tensor of a quantized weight represents. It is used for weights that this program
can't decode.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from dtype_engine.checkpoint.packed_weights import Stored, packed_weights

Count = int | Literal["unknown"] | None
"""The number of parameters that a tensor represents, or "unknown". None means one parameter for each element of the tensor."""


def parameters_meant(tensors: Mapping[str, Stored], parts: Iterable[str]) -> dict[str, Count]:
    """Return the number of parameters that each tensor of a quantized weight represents, keyed by tensor name. The codes
    represent all parameters of the weight, so the number is 0 for its other tensors, such as scales and zero points. For codes
    that are packed in bytes or words, the number is "unknown", because the names and shapes don't tell how many codes an element
    holds.

    parts: the names of the tensors to count, which all belong to quantized weights. tensors: all tensors of the file.
    """
    counts: dict[str, Count] = dict.fromkeys(parts, 0)
    if not counts:
        return {}
    from dtype_engine.checkpoint.schemes.registry import layouts

    found = {weight.codes: weight.layout for weight in packed_weights(tensors)}
    alone = {layout.codes: layout for layout in layouts() if layout.codes not in ("", "weight")}
    for name in counts:
        layout = found.get(name) or next((alone[end] for end in alone if name.endswith(end)), None)
        if layout is not None:
            dtype = tensors[name].dtype
            counts[name] = None if dtype.startswith(("float8", "int8")) and not layout.several else "unknown"
    return counts
