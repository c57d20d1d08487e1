"""Computes how many parameters of the model each tensor of a quantized weight represents. It is used for weights that this program
can't decode.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from dtype_engine.checkpoint.packed_weights import DEEPSEEK_V4, Stored, packed_weights

Count = int | Literal["unknown"] | None
"""The number of parameters that a tensor represents, or "unknown". None means one parameter for each element of the tensor."""
_CODES_ALONE = (".qweight", ".weight_packed", ".W_q")
"""Suffixes that only tensors with codes have. Such a suffix identifies codes even if their scales are missing."""


def parameters_meant(tensors: Mapping[str, Stored], parts: Iterable[str]) -> dict[str, Count]:
    """Return the number of parameters that each tensor of a quantized weight represents, keyed by tensor name. The codes
    represent all parameters of the weight, so the number is 0 for its other tensors, such as scales and zero points. For codes
    that are packed in bytes or words, the number is "unknown", because the names and shapes don't tell how many codes an element
    holds.

    parts: the names of the tensors to count, which all belong to quantized weights. tensors: all tensors of the file.
    """
    counts: dict[str, Count] = dict.fromkeys(parts, 0)
    for weight in packed_weights(tensors):
        if weight.codes in counts:
            whole = tensors[weight.codes].dtype.startswith(("float8", "int8")) and weight.layout is not DEEPSEEK_V4
            counts[weight.codes] = None if whole else "unknown"
    return counts | {name: "unknown" for name, count in counts.items() if count == 0 and name.endswith(_CODES_ALONE)}


def integer_schemes(config: Mapping[str, Any]) -> set[tuple[int, int | None]]:
    """Return the pairs (bits per value, group size) with which integer weights are packed, according to the `config_groups` of the
    configuration's `quantization_config`. The group size is None if it is not declared. config: the content of config.json.
    """
    declared = config.get("quantization_config")
    groups = declared.get("config_groups") if isinstance(declared, Mapping) else None
    found = set()
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and weights.get("type", "int") == "int":
            bits, size = weights.get("num_bits"), weights.get("group_size")
            if isinstance(bits, int) and 0 < bits <= 8:
                found.add((bits, size if isinstance(size, int) else None))
    return found
