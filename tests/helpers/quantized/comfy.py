"""Checkpoints of ComfyUI's weights with two codes per byte. Scales of rotated weights are powers of two, so sums are exact."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tests.helpers.quantized.case import E4M3, Array, Case, nibbles, text

Shape = tuple[int, int]


def _case(tensors: dict[str, torch.Tensor], right: Array, form: str, about: dict[str, Any]) -> Case:
    tensors = {f"x.weight{end}": tensor for end, tensor in tensors.items()}
    tensors["x.comfy_quant"] = text(json.dumps(about))
    return Case(tensors, {"x.weight": right.astype(np.float32)}, f"comfy:{form}", alone=True)


def _rotated(values: Array, wide: int) -> Array:
    """Multiply each group of `wide` columns, a power of four, by ConvRot's Hadamard matrix."""
    four = np.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], np.float64) / 2
    matrix = np.ones((1, 1))
    while len(matrix) < wide:
        matrix = np.kron(matrix, four)
    return np.concatenate(
        [part @ matrix for part in np.split(values.astype(np.float64), values.shape[1] // wide, 1)], 1
    )


def _powers(shape: tuple[int, ...], seed: int = 1) -> Array:
    return np.exp2(np.random.default_rng(seed).integers(-6, 2, shape)).astype(np.float32)


def w4a4(shape: Shape = (130, 80), rotation: int = 16) -> Case:
    """Return signed integers of 4 bits with a scale for each row, rotated."""
    codes, scale = np.random.default_rng(0).integers(-8, 8, shape), _powers(shape[:1])
    about = {"format": "convrot_w4a4", "convrot_groupsize": rotation, "linear_dtype": "int8"}
    tensors = {"": nibbles(codes & 15).view(torch.int8), "_scale": torch.from_numpy(scale)}
    return _case(tensors, _rotated(codes * scale[:, None], rotation), "rotated_int4@channel", about)


def awq(shape: Shape = (131, 192), group: int = 64, dtype: torch.dtype = torch.bfloat16) -> Case:
    """Return integers of 4 bits with a scale and an offset for each group, which are stored group by group."""
    random, grid = np.random.default_rng(2), (shape[1] // group, shape[0])
    codes = random.integers(0, 16, shape)
    scale = torch.from_numpy(random.uniform(0.01, 2, grid)).to(dtype)
    offset = torch.from_numpy(random.normal(size=grid)).to(dtype)
    tensors = {"": nibbles(codes).view(torch.int8), "_scale": scale, "_zeros": offset}
    scales, offsets = (np.repeat(part.to(torch.float32).numpy().T, group, 1) for part in (scale, offset))
    right = (codes - 8).astype(np.float32) * scales + offsets
    return _case(tensors, right, f"uint4@g{group}", {"format": "awq_w4a16"})


def w4a8(shape: Shape = (130, 80), bits: int = 4, table: bool = True, rotation: int = 16, raw: bool = False) -> Case:
    """Return codes whose scaled values are rounded to int8, rotated. raw: whether scales of groups are stored as uint8."""
    random, groups = np.random.default_rng(3), shape[1] // 16
    codes = random.integers(0, 1 << bits, shape)
    fp8 = random.integers(1, 0x7F, (shape[0], groups), dtype=np.uint8)
    of_rows = _powers(shape[:1])
    packed = nibbles(codes & 15)
    if bits == 6:
        high = sum((codes[:, place::4] >> 4) << 2 * place for place in range(4))
        packed = torch.cat([packed, torch.from_numpy(np.asarray(high, np.uint8))], 1)
    scale = torch.from_numpy(fp8)
    tensors = {"": packed.view(torch.int8), "_s_channel": torch.from_numpy(of_rows)}
    tensors["_s_rel"] = scale if raw else scale.view(torch.float8_e4m3fn)
    values = (codes - (1 << bits - 1)).astype(np.float32)
    if table:
        levels = np.sort(random.uniform(-1, 1, 16)).astype(np.float32)
        tensors["_codebook"], values = torch.from_numpy(levels), levels[codes]
    grid = np.clip(np.round(values * np.repeat(E4M3[fp8], 16, 1)), -127, 127)
    about = {"format": "asym_w4a8_int8", "params": {"group_size": 16, "convrot": True, "convrot_groupsize": rotation}}
    form = f"rotated_int{bits}{'_codebook' * table}@g16"
    return _case(tensors, _rotated(grid * of_rows[:, None], rotation), form, about)


CASES: dict[str, Callable[[], Case]] = {
    "comfy int4 rotated": w4a4,
    "comfy int4 with offsets": awq,
    "comfy int4 by a codebook": w4a8,
    "comfy int4 on the grid of int8": lambda: w4a8(table=False, raw=True),
    "comfy int6 on the grid of int8": lambda: w4a8(bits=6, table=False),
}
"""A small checkpoint of each way to store a weight."""
