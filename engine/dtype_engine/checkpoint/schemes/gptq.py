"""Weights in GPTQ's layout, as AutoGPTQ, GPTQModel and AutoRound write it. `x` is a layer.

`x.qweight` [in * bits / 32, out] holds codes of 2, 3, 4 or 8 bits. They are packed along the inputs without gaps, the first in the
lowest bits. `x.qzeros` [groups, out * bits / 32] holds zero points, which are packed along the outputs. The first version of the
format stores each zero point minus one. `x.scales` [groups, out] holds the scales. `x.g_idx` [in] is optional and holds the group
of each input.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtype_engine.checkpoint.safetensors_header import CheckpointTensor
from dtype_engine.checkpoint.schemes.configuration import (
    block_name,
    declared,
    declared_numbers,
    group_size,
    quant_method,
)
from dtype_engine.checkpoint.schemes.encoded_weight import CODES, EncodedWeight
from dtype_engine.checkpoint.schemes.scaled_codes import packed_words

SCHEME = "gptq"
_ADDED = {
    ("gptq", "gptq"): 1, ("gptq", "gptq_v2"): 0,
    ("auto-round", "auto_round:auto_gptq"): 1, ("auto-round", "auto_round:gptq"): 1, ("auto-round", "auto"): 1,
    ("auto-round", "auto_round"): 0, ("auto-round", "auto_round:gptqmodel"): 0,
}  # fmt: skip
"""Maps (quantization method, its format), as a configuration names them, to the number that the decoder adds to each stored zero
point. Other methods and formats do not use this layout.
"""


def read(
    tensors: Mapping[str, CheckpointTensor], config: Mapping[str, Any], metadata: Mapping[str, str]
) -> dict[str, EncodedWeight]:
    """Return the weights that are stored in GPTQ's layout, keyed by name. tensors: all tensors of the files, by name. config: the
    content of config.json. metadata: the metadata of the files' headers.
    """
    settings = declared(config)
    method = quant_method(settings)
    usual = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    added = _ADDED.get((method, str(settings.get("packing_format") if method == "auto-round" else usual)))
    if added is None:
        return {}
    widths, sizes = declared_numbers(settings, "bits"), declared_numbers(settings, "group_size")
    found = {}
    for stem, codes, scale, zero in packed_words(tensors):
        order = tensors.get(f"{stem}g_idx")
        groups, rows = scale.shape
        bits = 32 * zero.shape[1] // rows if rows else 0
        if bits not in (2, 3, 4, 8) or bits not in widths:
            continue
        columns = 32 * codes.shape[0] // bits
        size = group_size(sizes, columns, groups)
        grid = codes.shape == (columns * bits / 32, rows) and zero.shape == (groups, rows * bits / 32)
        if size is None or not grid or (order is not None and (order.shape, order.dtype) != ((columns,), "int32")):
            continue
        found[f"{stem}weight"] = EncodedWeight(
            f"{stem}weight",
            (rows, columns),
            SCHEME,
            f"{method}:int{bits}@{block_name(size, columns)}",
            {CODES: codes, "scale": scale, "zero": zero} | ({} if order is None else {"g_idx": order}),
            {"bits": bits, "group": size, "added": added},
        )
    return found
