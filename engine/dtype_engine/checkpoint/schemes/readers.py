"""Applies the readers of all schemes to a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from dtype_engine.checkpoint.safetensors_header import CheckpointTensor
from dtype_engine.checkpoint.schemes import (
    awq,
    bitsandbytes,
    comfy,
    compressed_tensors,
    fp8_blocks,
    gpt_oss,
    gptq,
    hqq,
    mlx,
    modelopt,
    quanto,
    quark,
    torchao,
)
from dtype_engine.checkpoint.schemes.encoded_weight import EncodedWeight
from dtype_engine.core.gc_pause import gc_paused

Reader = Callable[
    [Mapping[str, CheckpointTensor], Mapping[str, Any], Mapping[str, str]],
    dict[str, EncodedWeight],
]
_READERS: tuple[Reader, ...] = (
    fp8_blocks.read,
    compressed_tensors.read,
    modelopt.read,
    gpt_oss.read,
    quark.read,
    gptq.read,
    awq.read,
    bitsandbytes.read,
    hqq.read,
    mlx.read,
    torchao.read,
    quanto.read,
    comfy.read,
)
_BESIDE = (
    ".input_scale", ".input_global_scale", ".input_zero_point", ".output_scale", ".output_zero_point", ".k_scale", ".v_scale",
    ".activation_scale", ".scale_input",
)  # fmt: skip
"""Suffixes of tensors that belong to the inputs or outputs of a layer or to the KV cache. They do not change the values of the
layer's weight.
"""


def read_encoded(
    tensors: Mapping[str, CheckpointTensor], config: Mapping[str, Any] | None, metadata: Mapping[str, str]
) -> dict[str, EncodedWeight]:
    """Return the weights that other programs quantized. The keys are the names that the weights have in the unquantized
    checkpoint.

    tensors: all tensors of the files, by name. config: the content of config.json, or None. metadata: the metadata of the files'
    headers. Raises UserError if a small tensor that describes a weight can't be read.
    """
    found: dict[str, EncodedWeight] = {}
    with gc_paused():
        for read in _READERS:
            found = read(tensors, config or {}, metadata) | found
    beside: dict[str, tuple[CheckpointTensor, ...]] = {}
    for name, tensor in tensors.items():
        if name.endswith(_BESIDE):
            module = name.rpartition(".")[0]
            beside[module] = (*beside.get(module, ()), tensor)
    for name, weight in found.items() if beside else ():
        if more := beside.get(name.rpartition(".")[0]):
            found[name] = replace(weight, beside=(*weight.beside, *more))
    return found
