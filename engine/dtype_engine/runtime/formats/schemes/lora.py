"""Computes the values of weights with a PEFT adapter: what LoRA adds is computed and added in float32.

The formulas are those of `merge` and `get_delta_weight` in `peft/tuners/lora/layer.py` and `variants.py` of peft 0.21.
"""

from __future__ import annotations

import torch

from dtype_engine.checkpoint.schemes import CODES, CodedWeight
from dtype_engine.checkpoint.schemes.lora import BASE, BIAS, EXPERT, EXPERTS, MAGNITUDE, SCALE, TRANSPOSED, A, B
from dtype_engine.runtime.formats import schemes
from dtype_engine.runtime.formats.schemes import Parts

_TILE = 64
"""Rows are computed in multiples of this. A matrix product adds in another order for another number of rows."""


def decode(weight: CodedWeight, parts: Parts, first: int, last: int) -> torch.Tensor:
    """Return a weight with its adapter merged, from `first` up to `last` along its first dimension, in float32. The values do not
    depend on which others are computed beside them.
    """
    # The values may be changed later, outside of inference mode.
    with torch.inference_mode(False), torch.no_grad():
        if A not in parts or _has_matrices(weight):
            return _decode(weight, parts, first, last)
        values = torch.empty(last - first, *weight.shape[1:])
        for start in range(first // _TILE * _TILE, last, _TILE):
            tile = _decode(weight, parts, start, min(start + _TILE, weight.shape[0]))
            begin, end = max(first, start), min(last, start + _TILE)
            values[begin - first : end - first] = tile[begin - start : end - start]
        return values


def _has_matrices(weight: CodedWeight) -> bool:
    """Return whether each index of the weight's first dimension is a matrix of its own, that of an expert."""
    return EXPERTS in weight.settings and EXPERT not in weight.settings


def _decode(weight: CodedWeight, parts: Parts, first: int, last: int) -> torch.Tensor:
    values = decode_base(weight, parts, first, last)
    if BIAS in parts:
        values += weight.settings[SCALE] * parts[BIAS][first:last].to(torch.float32)
    if A not in parts:
        return values
    scale, down, up = weight.settings[SCALE], parts[A], parts[B]
    if EXPERTS in weight.settings:
        _add_to_experts(weight, values, (down, up), (first, last))
    elif weight.settings[TRANSPOSED]:
        rows = down[:, first:last].to(torch.float32)
        values.addmm_(rows.T, up.to(torch.float32).T, alpha=scale)
    else:
        rows = up.reshape(len(up), -1)[first:last].to(torch.float32)
        flat = values.view(last - first, -1)
        flat.addmm_(rows, down.reshape(len(down), -1).to(torch.float32), alpha=scale)
    if MAGNITUDE in parts:
        lengths = torch.linalg.vector_norm(values, dim=1)
        values *= (parts[MAGNITUDE].reshape(-1)[first:last].to(torch.float32) / lengths)[:, None]
    return values


def decode_base(weight: CodedWeight, parts: Parts, first: int, last: int) -> torch.Tensor:
    """Return the values of the weight in the base model, in float32 and in new memory. first, last: as in `decode`."""
    base: CodedWeight | None = weight.settings.get(BASE)
    if base is None:
        return parts[CODES][first:last].to(torch.float32, copy=True)
    return schemes.decode(base, {role: parts[role] for role in base.parts}, first, last).clone()


def _add_to_experts(
    weight: CodedWeight, values: torch.Tensor, factors: tuple[torch.Tensor, torch.Tensor], taken: tuple[int, int]
) -> None:
    """Add the products of experts to `values`. factors: A and B of all experts. taken: the first index along the first dimension
    of the weight and the index after the last; they count experts, or rows if the weight is of one expert.
    """
    settings, (first, last) = weight.settings, taken
    count: int = settings[EXPERTS]
    down = factors[0].reshape(count, -1, factors[0].shape[1])
    up = factors[1].reshape(len(factors[1]), -1, count)
    if EXPERT in settings:
        expert, start, _ = settings[EXPERT]
        rows = up[start + first : start + last, :, expert].to(torch.float32)
        values.addmm_(rows, down[expert].to(torch.float32), alpha=settings[SCALE])
        return
    for expert in range(first, last):
        left, right = up[:, :, expert].to(torch.float32), down[expert].to(torch.float32)
        if settings.get(TRANSPOSED):
            values[expert - first].addmm_(right.T, left.T, alpha=settings[SCALE])
        else:
            values[expert - first].addmm_(left, right, alpha=settings[SCALE])
