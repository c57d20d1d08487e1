"""Defines `Parts`: the stored tensors of a quantized weight, from which a decoder computes values."""

from __future__ import annotations

from collections.abc import Mapping

import torch

Parts = Mapping[str, torch.Tensor]
"""The tensors that the files store for one weight, keyed by their role, such as "codes" and "scale". They may be memory-mapped from
the files, so they are never written to.
"""
