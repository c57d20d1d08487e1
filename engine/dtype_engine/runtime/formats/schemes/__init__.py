"""Decoders of weights that are stored as codes. Each has a function `decode` for one or more schemes of `checkpoint/schemes`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module

import torch

from dtype_engine.checkpoint.schemes import CodedWeight

Parts = Mapping[str, torch.Tensor]
"""The tensors that the files store for a weight, by role. They may be memory-mapped, so they are never written to."""


def decode(weight: CodedWeight, parts: Parts, first: int = 0, last: int | None = None) -> torch.Tensor:
    """Return a weight's values from `first` up to `last` (by default the end) along its first dimension, in float32, not rounded
    further.
    """
    decoder: Callable[[CodedWeight, Parts, int, int], torch.Tensor]
    decoder = import_module(f"{__name__}.{weight.scheme.decoder}").decode
    return decoder(weight, parts, first, (weight.shape or (1,))[0] if last is None else last)
