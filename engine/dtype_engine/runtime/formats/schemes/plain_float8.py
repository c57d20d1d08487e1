"""Widens values that are stored in float8 without scales."""

from __future__ import annotations

import math

import torch

from dtype_engine.checkpoint.schemes import CODES, CodedWeight
from dtype_engine.runtime.formats.schemes import Parts
from dtype_engine.runtime.formats.schemes.unpack import decode_rows, write_plain


def decode(weight: CodedWeight, parts: Parts, first: int, last: int) -> torch.Tensor:
    """Return the values of a float8 weight without scales from `first` up to `last` along its first dimension, in float32."""
    columns = math.prod(weight.shape[1:])
    codes = parts[CODES].reshape((weight.shape or (1,))[0], columns)

    def fill(out: torch.Tensor, start: int, stop: int) -> None:
        write_plain(codes[start:stop], out)

    values = decode_rows(first, last, columns, fill)
    return values.view(last - first, *weight.shape[1:]) if weight.shape else values.view(())
