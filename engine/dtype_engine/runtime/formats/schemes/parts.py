"""The tensors of an encoded weight as a decoder gets them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

Parts = Mapping[str, torch.Tensor]
"""The tensors of one weight by their role, such as "codes" and "scale". They may be mapped from the files, so they are never
written to.
"""
