"""Decoders of weights that are stored as codes. They compute float32 values from the tensors that the files store, such as
codes and scales. There is a file for each quantization scheme or family of schemes.

The readers in `checkpoint/schemes` find out which tensors form a weight.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dtype_engine.checkpoint.schemes import EncodedWeight
from dtype_engine.checkpoint.schemes.encoded_weight import OWN
from dtype_engine.runtime.formats.schemes import (
    awq,
    bitsandbytes,
    block_scaled,
    gguf,
    gptq,
    hqq,
    mlx,
    own,
    quanto,
    torchao,
)
from dtype_engine.runtime.formats.schemes.parts import Parts

__all__ = ["Parts", "decode"]

Decoder = Callable[[EncodedWeight, Parts, int, int], torch.Tensor]
_DECODERS: dict[str, Decoder] = {
    **dict.fromkeys(
        ("fp8", "ct", "modelopt", "deepseek", "gpt-oss", "comfy", "quark", "torchao", "awq"), block_scaled.decode
    ),
    OWN: own.decode,
    "gguf": gguf.decode,
    "gptq": gptq.decode,
    "awq gemv": awq.decode,
    "awq gemv fast": awq.decode_fast,
    "bnb": bitsandbytes.decode,
    "hqq": hqq.decode,
    "mlx": mlx.decode,
    "quanto": quanto.decode,
    "quanto bits": quanto.decode_bits,
    "torchao int4": torchao.decode,
}


def decode(weight: EncodedWeight, parts: Parts, first: int = 0, last: int | None = None) -> torch.Tensor:
    """Return a weight's values, computed in float32 and not rounded to a narrower dtype. They are the rows from `first` up to
    `last`, by default all. A row is everything at one index of the first dimension.

    parts: the tensors that the files store for the weight, keyed by role, such as "codes" and "scale".
    """
    return _DECODERS[weight.scheme](weight, parts, first, (weight.shape or (1,))[0] if last is None else last)
