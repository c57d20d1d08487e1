"""Checkpoints in the layouts of SDNQ, whose weights may be a sum of codes and a product of two small matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tests.helpers.quantized.case import E4M3, Array, Case, float_values, floats


def packed(codes: Array, bits: int) -> torch.Tensor:
    """Pack unsigned codes in bytes as the functions `pack_uint2` to `pack_uint7` of SDNQ do."""
    if bits in (2, 4):
        rows = codes.reshape(-1, 8 // bits).astype(np.uint8)
        return torch.from_numpy(sum(rows[:, place] << bits * place for place in range(8 // bits)).astype(np.uint8))
    code = codes.reshape(-1, 4 if bits == 6 else 8).astype(np.uint8).T
    if bits == 7:
        held = [code[byte] | code[7] << (byte + 1) & 128 for byte in range(7)]
    elif bits == 6:
        held = [code[byte] | code[3] << (2 * byte + 2) & 192 for byte in range(3)]
    elif bits == 5:
        held = [code[byte] | code[5 + byte] << 5 for byte in range(3)]
        held += [code[3 + byte] | code[5 + byte] << 2 & 96 | code[7] << (3 + byte) & 128 for byte in range(2)]
    else:
        held = [code[byte] | code[3 + byte] << 3 for byte in range(3)]
        held = [held[0] | code[6] << 6, held[1] | code[7] << 6, held[2] | code[6] << 4 & 64 | code[7] << 5 & 128]
    return torch.from_numpy(np.stack(held, 1))


def hadamard(columns: int) -> Array:
    """Return the symmetric Hadamard matrix with which SDNQ multiplies groups of columns, whose rows have the length 1."""
    four = np.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]])
    base, matrix = four if columns in (4, 16, 64, 256) else np.array([[1, 1], [1, -1]]), np.ones((1, 1))
    while len(matrix) < columns:
        matrix = np.kron(matrix, base)
    return matrix / np.sqrt(columns)


def sdnq(
    kind: str = "uint4", size: int = 20, rank: int = 0, transposed: bool = False, rotation: int = 0,
    shape: tuple[int, int] = (24, 80),
) -> Case:  # fmt: skip
    """A weight of SDNQ. kind: the type of its codes. size: the columns of a group, -1 for a row. rank: that of the product which is
    added, or 0. transposed: whether codes and matrices are transposed. rotation: the columns of a Hadamard matrix, or 0. With a
    product or a rotation, all numbers have so few bits that each sum is exact.
    """
    random, (rows, columns) = np.random.default_rng(3), shape
    each = columns if size == -1 else size
    grid, exact = (rows, columns // each), bool(rank or rotation)
    scale = torch.from_numpy(np.exp2(random.integers(-3, 1, grid)) if exact else random.uniform(0.01, 0.1, grid))
    scale = scale.to(torch.float32)
    tensors: dict[str, torch.Tensor] = {}
    if kind == "float8_e4m3fn":
        codes = random.choice(np.array([code for code in range(256) if code & 127 != 127], np.uint8), shape)
        values, name, held = E4M3[codes], "e4m3", torch.from_numpy(codes).view(torch.float8_e4m3fn)
    elif kind.startswith("float"):
        exponent, mantissa = int(kind.partition("_e")[2][0]), int(kind.partition("m")[2][0])
        bits = 1 + exponent + mantissa
        codes = random.integers(0, 1 << bits, shape)
        values, name, held = float_values(exponent, mantissa)[codes], f"e{exponent}m{mantissa}", packed(codes, bits)
    else:
        bits, name = int(kind[-1]), kind
        codes = random.integers(0, 1 << bits, shape)
        low = 0 if kind.startswith("u") else 1 << (bits - 1)
        values = (codes - low).astype(np.float32)
        if bits == 8:
            held = torch.from_numpy((codes - low).astype(np.uint8 if low == 0 else np.int8))
            held = held if size == -1 else held.view(*grid, each)
        else:
            held = packed(codes, bits)
    right = values * floats(scale).repeat(each, 1)
    if kind.startswith("u"):
        zero = torch.from_numpy(random.integers(-8, 8, grid) / 8 if exact else random.uniform(-1, 1, grid)).float()
        tensors["m.zero_point"] = zero
        right = right + floats(zero).repeat(each, 1)
    tensors |= {"m.weight": held, "m.scale": scale}
    if transposed:
        tensors = {end: tensor.t() for end, tensor in tensors.items()}
    elif size != -1:
        tensors |= {end: tensor[..., None] for end, tensor in tensors.items() if end != "m.weight"}
    settings: dict[str, Any] = {"quant_method": "sdnq", "weights_dtype": kind, "group_size": size}
    if rank:
        up, down = random.integers(-8, 8, (rows, rank)), random.integers(-8, 8, (rank, columns)) / 4
        right = right + (up @ down).astype(np.float32)
        for end, matrix in (("up", up), ("down", down)):
            tensors[f"m.svd_{end}"] = torch.from_numpy(matrix.T if transposed else matrix).to(torch.bfloat16)
        settings |= {"use_svd": True, "svd_rank": rank}
    if rotation:
        settings |= {"use_hadamard": True, "hadamard_group_size": rotation}
        groups = right.astype(np.float64).reshape(rows, -1, rotation)
        right = (groups @ hadamard(rotation)).reshape(shape).astype(np.float32)
    form = f"sdnq:{'rotated_' * bool(rotation)}{name}{'_svd' * bool(rank)}@{'channel' if size == -1 else f'g{size}'}"
    return Case(tensors, {"m.weight": right}, form, {"quantization_config": settings})


CASES: dict[str, Callable[[], Case]] = {
    "sdnq uint4": sdnq,
    "sdnq int8, transposed": lambda: sdnq("int8", -1, transposed=True),
    "sdnq int5": lambda: sdnq("int5"),
    "sdnq fp8": lambda: sdnq("float8_e4m3fn", -1),
    "sdnq fp6": lambda: sdnq("float6_e3m2fn"),
    "sdnq uint4 with low rank": lambda: sdnq(rank=3),
    "sdnq int4, rotated": lambda: sdnq("int4", rotation=16),
}
"""A small checkpoint of each way to store a weight, which is called `m.weight`."""
