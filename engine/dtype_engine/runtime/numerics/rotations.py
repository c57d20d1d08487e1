"""Rotations of the channels of one token in one head, which some formats of KV caches do before they round. The arithmetic is in
float32.

The matrix is Sylvester's Hadamard matrix H, made of +1 and -1: H x H = n x I for n channels. vLLM rotates keys, values and queries,
and never rotates keys back: products of rotated queries and keys are those of unrotated ones. Here, what was rounded is rotated
back at once, and queries stay as they are, which gives the same attention.
"""

from __future__ import annotations

import functools

import torch

_SEED = 0x9E3779B9
"""The seed of torch's CPU generator with which vLLM draws the signs of `signed_hadamard`."""


def hadamard(rows: torch.Tensor) -> torch.Tensor:
    """Return H x for each row x of a tensor [..., n], without a factor. n is a power of two. Each result is a sum of the same terms
    in the same order, however many rows there are.
    """
    width, apart = rows.shape[-1], 1
    # All rows of a channel lie side by side, so that sums are of long vectors.
    summed = rows.reshape(-1, width).t().clone(memory_format=torch.contiguous_format)
    other = torch.empty_like(summed)
    while apart < width:
        pairs, sums = (each.view(-1, 2, apart * summed.shape[1]) for each in (summed, other))
        torch.add(pairs[:, 0], pairs[:, 1], out=sums[:, 0])
        torch.sub(pairs[:, 0], pairs[:, 1], out=sums[:, 1])
        summed, other = other, summed
        apart *= 2
    return summed.t().contiguous().view(rows.shape)


def block_of(width: int) -> int:
    """Return the largest power of two that divides a number of channels."""
    return width & -width


def signed_hadamard(rows: torch.Tensor) -> torch.Tensor:
    """Return H D x for each block of channels of a tensor [..., width], without a factor: D flips the signs of some channels, and a
    block has `block_of(width)` of them (vLLM, `v1/attention/ops/int4_per_token_head.py`, `single_rht`).
    """
    block = block_of(rows.shape[-1])
    return hadamard(rows.reshape(-1, block) * _signs(block).to(rows.device)).reshape(rows.shape)


def undo_signed_hadamard(rows: torch.Tensor) -> torch.Tensor:
    """Return what `signed_hadamard` was given, but for the last bits, if `rows` is its result."""
    block = block_of(rows.shape[-1])
    return (hadamard(rows.reshape(-1, block)) * _signs(block).to(rows.device)).div_(block).reshape(rows.shape)


@functools.cache
def _signs(block: int) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(_SEED)
    return torch.bernoulli(torch.full((block,), 0.5, device="cpu"), generator=generator).mul_(2).sub_(1)
