"""KV caches as vLLM 0.33 computes with them, written with numpy and scipy: `v1/attention/ops/int4_per_token_head.py`,
`triton_turboquant_store.py`, `triton_turboquant_decode.py` and `model_executor/layers/quantization/turboquant/centroids.py`.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import numpy as np
import torch
from scipy.linalg import hadamard

Array = np.ndarray[Any, np.dtype[Any]]
F32 = np.float32


@functools.cache
def signed_hadamard(width: int) -> tuple[Array, int]:
    """Return (the matrix M with which int4 multiplies rows, the number n for which M M^T = n I), in float64."""
    block = width & -width
    generator = torch.Generator().manual_seed(0x9E3779B9)
    signs = 2 * torch.bernoulli(torch.full((block,), 0.5), generator=generator).double().numpy() - 1
    return np.kron(np.eye(width // block), signs[:, None] * hadamard(block)), block


def int4_rotated(x: Array) -> Array:
    """Return what int4 reads of keys or values that are rotated already, float32."""
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    scale = np.maximum((high - low) / F32(15), F32(1e-6))
    zero = np.clip(np.floor(-low / scale + F32(0.5)), 0, 15)
    codes = np.clip(np.floor(x * (F32(1) / scale) + zero + F32(0.5)), 0, 15)
    stored = (scale.view(np.int32) & ~15) | zero.astype(np.int32)
    return (codes - (stored & 15).astype(F32)) * (stored & ~15).view(F32)


def int4(x: Array) -> Array:
    """Return what int4 stands for, rotated back."""
    matrix, count = signed_hadamard(x.shape[-1])
    return (int4_rotated((x.astype(np.float64) @ matrix).astype(F32)) @ matrix.T / count).astype(F32)


@functools.cache
def centroids(width: int, bits: int) -> Array:
    """Return the codes of TurboQuant's keys: Lloyd's algorithm, with integrals by the trapezoidal rule of 200 parts."""
    sigma, count = math.sqrt(1 / width), 2**bits
    codes = [-3.5 * sigma + 7 * sigma * (index + 0.5) / count for index in range(count)]

    def integral(a: float, b: float, power: int) -> float:
        weighted = [
            (at**power) * math.exp(-at * at * width / 2) * (0.5 if step in (0, 200) else 1)
            for step, at in enumerate(a + (b - a) / 200 * step for step in range(201))
        ]
        return sum(weighted) * (b - a)

    for _ in range(200):
        edges = [-10.5 * sigma, *((a + b) / 2 for a, b in itertools.pairwise(codes)), 10.5 * sigma]
        new = [integral(a, b, 1) / integral(a, b, 0) for a, b in itertools.pairwise(edges)]
        if max(abs(a - b) for a, b in zip(codes, new, strict=True)) < 1e-10:
            break
        codes = new
    return np.array(codes, F32)


def turboquant_keys_rotated(x: Array, bits: int) -> Array:
    """Return what TurboQuant reads of keys, before it is rotated back, float32."""
    width = x.shape[-1]
    norm = np.sqrt((x.astype(np.float64) ** 2).sum(-1, keepdims=True))
    turned = (x / (norm + 1e-8) @ hadamard(width) / math.sqrt(width)).astype(F32)
    codes = centroids(width, bits)
    found = codes[np.searchsorted((codes[1:] + codes[:-1]) / F32(2), turned, side="right")]
    found = found / np.sqrt((found * found).sum(-1, keepdims=True) + F32(1e-16))
    return np.asarray(found * norm.astype(F32).astype(np.float16).astype(F32), F32)


def turboquant_keys(x: Array, bits: int) -> Array:
    """Return what TurboQuant's keys stand for, rotated back."""
    width = x.shape[-1]
    return np.asarray(turboquant_keys_rotated(x, bits) @ hadamard(width) / math.sqrt(width), F32)


def turboquant_values(x: Array, bits: int) -> Array:
    """Return what TurboQuant reads of values."""
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    scale = np.maximum((high - low) / F32(2**bits - 1), F32(1e-8))
    codes = np.clip(np.floor((x - low) / scale + F32(0.5)), 0, 2**bits - 1).astype(F32)
    return codes * scale.astype(np.float16).astype(F32) + low.astype(np.float16).astype(F32)
