"""Decoders of weights that are stored as codes. They compute float32 values from the tensors that the files store, such as
codes and scales. There is a file for each quantization scheme or family of schemes, with a function `decode`.

The schemes in `checkpoint/schemes` name their decoders, and find out which tensors form a weight.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch

from dtype_engine.checkpoint.schemes import CodedWeight
from dtype_engine.runtime.formats.schemes.parts import Parts

__all__ = ["Parts", "decode"]


def decode(weight: CodedWeight, parts: Parts, first: int = 0, last: int | None = None) -> torch.Tensor:
    """Return a weight's values, computed in float32 and not rounded to a narrower dtype. They are the rows from `first` up to
    `last`, by default all. A row is everything at one index of the first dimension.

    parts: the tensors that the files store for the weight, keyed by role, such as "codes" and "scale".
    """
    decoder: Callable[[CodedWeight, Parts, int, int], torch.Tensor]
    decoder = import_module(f"{__name__}.{weight.scheme.decoder}").decode
    return decoder(weight, parts, first, (weight.shape or (1,))[0] if last is None else last)
