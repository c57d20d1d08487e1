"""Small checkpoints in the layouts of other programs' quantisers, key by key, with the values that they hold.

Codes are packed by Python integers, and values are computed by numpy loops. Neither shares code with the engine.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from dtype_engine.checkpoint import open_checkpoint
from dtype_engine.checkpoint.checkpoint import Checkpoint
from dtype_engine.runtime.model.mmap_reader import read_encoded

Array = np.ndarray[Any, Any]


@dataclass
class Made:
    """A checkpoint that can be changed before it is written."""

    tensors: dict[str, torch.Tensor]
    right: dict[str, Array]
    """The values of each weight, float32."""
    config: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)

    def open(self, folder: Path) -> Checkpoint:
        """Write the checkpoint to a folder and open it."""
        folder.mkdir(exist_ok=True)
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        save_file(tensors, folder / "model.safetensors", metadata=self.metadata or None)
        (folder / "config.json").write_text(json.dumps(self.config))
        return open_checkpoint(folder)

    def check(self, folder: Path, form: str) -> None:
        """Write and open the checkpoint, and compare each weight's format, shape and values with what it was made from: all rows,
        and rows that begin and end inside words, blocks and tiles.
        """
        found = self.open(folder).encoded
        assert found.keys() == self.right.keys()
        for name, right in self.right.items():
            weight = found[name]
            assert (weight.format, weight.shape) == (form, right.shape)
            np.testing.assert_array_equal(read_encoded(weight).numpy(), right)
            for first, last in ((0, 1), (3, 21), (len(right) - 2, len(right))):
                np.testing.assert_array_equal(read_encoded(weight, first, last).numpy(), right[first:last])


def packed(codes: Array, bits: int, word: int = 32) -> Array:
    """Pack each row of codes into words, the first code in the lowest bits, without gaps. Returns uint32 or uint8."""
    rows = [sum(int(code) << (bits * place) for place, code in enumerate(row)) for row in codes]
    size = codes.shape[1] * bits // 8
    raw = b"".join(row.to_bytes(size, "little") for row in rows)
    return np.frombuffer(raw, np.uint32 if word == 32 else np.uint8).reshape(len(codes), -1).copy()


def words(codes: Array, bits: int) -> torch.Tensor:
    """Pack each row of codes into int32 words."""
    return torch.from_numpy(packed(codes, bits).view(np.int32))


def numbers(random: np.random.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return positive random factors."""
    return torch.from_numpy(random.uniform(0.01, 0.1, shape)).to(dtype)


def floats(tensor: torch.Tensor) -> Array:
    """Return a tensor's values as float32."""
    return tensor.to(torch.float32).numpy()


def text(value: str) -> torch.Tensor:
    """Return a text as the bytes of a tensor."""
    return torch.tensor(list(value.encode()), dtype=torch.uint8)


def e2m1(code: int) -> float:
    """The value of an E2M1 code by its definition: sign, two bits of exponent, one of mantissa."""
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, code >> 1 & 3, code & 1
    return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def e4m3(code: int) -> float:
    """The value of a float8_e4m3fn code that is not NaN: sign, four bits of exponent, three of mantissa."""
    code = int(code)  # numpy's integers wrap
    sign, exponent, mantissa = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def float8_codes(random: np.random.Generator, *shape: int) -> Array:
    """Return random codes of float8_e4m3fn that are not NaN, as uint8."""
    return random.choice(np.array([code for code in range(256) if code & 127 != 127], np.uint8), shape)


def swizzled(scale: Array) -> Array:
    """Return scales [rows, columns] in tiles of 128 rows x 4 columns as tensor cores read them, with zeros in places that are not
    used.
    """
    rows, columns = scale.shape
    down, across = -(-rows // 128), -(-columns // 4)
    flat = np.zeros(down * across * 512, scale.dtype)
    for row in range(rows):
        for column in range(columns):
            tile = row // 128 * across + column // 4
            flat[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4] = scale[row, column]
    return flat.reshape(32 * down, 16 * across)


def gptq(bits: int = 4, form: str = "gptq", size: int = 32, columns: int = 96, order: str = "none") -> Made:
    """A weight [64, columns] in GPTQ's layout. form: "gptq" stores zero points minus one, "gptq_v2" as they are. order: "none" for
    a file without g_idx, "regular" or "shuffled".
    """
    random = np.random.default_rng(bits)
    each = columns if size == -1 else size
    groups, rows = -(-columns // each), 64
    codes, zeros = (random.integers(0, 1 << bits, (rows, extent)) for extent in (columns, groups))
    scale = numbers(random, torch.float16, groups, rows)
    group = np.arange(columns) // each
    if order == "shuffled":
        group = random.permutation(group)
    right = np.array([[(codes[i, j] - zeros[i, group[j]]) * floats(scale)[group[j], i] for j in range(columns)]
                      for i in range(rows)], np.float32)  # fmt: skip
    less = int(form == "gptq")
    if bits == 3:
        stored = words((zeros.T - less) % 8, bits)
    else:  # whole words are subtracted
        ones = int("1".zfill(bits) * (32 // bits), 2)
        stored = torch.from_numpy((packed(zeros.T, bits) - np.uint32(less * ones)).view(np.int32))
    tensors = {"m.qweight": words(codes, bits).t(), "m.qzeros": stored, "m.scales": scale}
    if order != "none":
        tensors["m.g_idx"] = torch.from_numpy(group.astype(np.int32))
    declared = {"quant_method": "gptq", "bits": bits, "group_size": size, "checkpoint_format": form}
    return Made(tensors, {"m.weight": right}, {"quantization_config": declared})


def awq(layout: str = "gemm", size: int = 32) -> Made:
    """A weight [64, 128] in one of AWQ's layouts."""
    random = np.random.default_rng(0)
    rows, columns, groups = 64, 128, 128 // size
    codes, zeros = (random.integers(0, 16, (rows, extent)) for extent in (columns, groups))
    scale = numbers(random, torch.float16, rows, groups)
    right = np.array([[(codes[i, j] - zeros[i, j // size]) * floats(scale)[i, j // size] for j in range(columns)]
                      for i in range(rows)], np.float32)  # fmt: skip
    if layout == "gemm":
        places = np.arange(rows).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(-1)
        tensors = {"m.qweight": words(codes.T[:, places], 4), "m.qzeros": words(zeros.T[:, places], 4)}
        tensors["m.scales"] = scale.t()
    else:
        unused = 8 * max(128 // size, 1) - groups
        tensors = {"m.qweight": words(codes, 4), "m.qzeros": words(np.pad(zeros, ((0, 0), (0, unused))), 4)}
        tensors["m.scales"] = torch.nn.functional.pad(scale, (0, unused))
    declared = {"quant_method": "awq", "bits": 4, "group_size": size, "version": layout}
    return Made(tensors, {"m.weight": right}, {"quantization_config": declared})


def bnb_4bit(shape: tuple[int, ...] = (24, 128), kind: str = "nf4", nested: bool = False) -> Made:
    """A weight of bitsandbytes' 4 bits in blocks of 64 values, with nested blocks of 16 factors."""
    random = np.random.default_rng(1)
    count, block, inner = int(np.prod(shape)), 64, 16
    blocks = -(-count // block)
    codes, table = random.integers(0, 16, count), random.normal(size=16).astype(np.float32)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": list(shape)}
    tensors = {"m.weight.quant_map": torch.from_numpy(table)}
    if nested:
        absmax = random.integers(0, 256, blocks).astype(np.uint8)
        outer = random.uniform(1, 2, -(-blocks // inner)).astype(np.float32)
        values, offset = random.uniform(0, 1, 256).astype(np.float32), 0.25
        factors = np.array([values[code] * outer[place // inner] for place, code in enumerate(absmax)], np.float32)
        factors += np.float32(offset)
        tensors |= {"m.weight.nested_absmax": torch.from_numpy(outer)}
        tensors |= {"m.weight.nested_quant_map": torch.from_numpy(values)}
        state |= {"nested_blocksize": inner, "nested_dtype": "float32", "nested_offset": offset}
    else:
        absmax = factors = random.uniform(1, 2, blocks).astype(np.float32)
    right = np.array([table[code] * factors[place // block] for place, code in enumerate(codes)], np.float32)
    even = np.append(codes, 0)[: count + count % 2]
    tensors["m.weight"] = torch.from_numpy((even[0::2] << 4 | even[1::2]).astype(np.uint8)[:, None])
    tensors["m.weight.absmax"] = torch.from_numpy(absmax)
    tensors[f"m.weight.quant_state.bitsandbytes__{kind}"] = text(json.dumps(state))
    return Made(tensors, {"m.weight": right.reshape(shape)})


def bnb_8bit() -> Made:
    """A weight [24, 40] of bitsandbytes' 8 bits."""
    random = np.random.default_rng(2)
    codes, scale = random.integers(-127, 128, (24, 40)), random.uniform(1, 2, 24).astype(np.float32)
    right = np.array([[np.float32(codes[i, j]) * scale[i] / np.float32(127) for j in range(40)] for i in range(24)])
    tensors = {"m.weight": torch.from_numpy(codes.astype(np.int8)), "m.SCB": torch.from_numpy(scale)}
    return Made(tensors | {"m.weight_format": torch.tensor(0, dtype=torch.uint8)}, {"m.weight": right})


_HQQ = {8: ("8bit_u8", 1), 4: ("4bit_u8", 2), 3: ("3bit_32", 10), 2: ("2bit_u8", 4), 1: ("1bit_u8", 8)}


def hqq(bits: int = 4, axis: int = 1, size: int = 16) -> Made:
    """A weight [32, 48] in HQQ's layout."""
    random = np.random.default_rng(bits)
    rows, columns = 32, 48
    groups = rows * columns // size
    packing, together = _HQQ[bits]
    matrix = random.integers(0, 1 << bits, (groups, size) if axis else (size, groups))
    scale, zero = (numbers(random, torch.bfloat16, *((groups, 1) if axis else (1, groups))) for _ in range(2))
    right = ((matrix.astype(np.float32) - floats(zero)) * floats(scale)).reshape(rows, columns)
    step = -(-len(matrix) // together)
    codes = np.zeros((step, matrix.shape[1]), np.int64)
    for place, row in enumerate(matrix):
        codes[place % step] |= row << (bits * (together - 1 - place // step))
    held = torch.from_numpy(codes.astype(np.int32 if bits == 3 else np.uint8))
    small = {"nbits": bits, "axis": axis, "group_size": size}
    tensors = {
        "W_q": held,
        "scale": scale,
        "zero": zero,
        "packing": text(packing),
        "shape": torch.tensor([rows, columns]),
    }
    tensors |= {key: torch.tensor(number, dtype=torch.int32) for key, number in small.items()}
    tensors |= {key: torch.tensor(0, dtype=torch.uint8) for key in ("quant_scale", "quant_zero", "view_as_float")}
    return Made({f"m.{key}": tensor for key, tensor in tensors.items()}, {"m.weight": right})


def mlx_affine(bits: int = 4, size: int = 32, name: str = "m", shape: tuple[int, ...] = (40, 64)) -> Made:
    """A weight in MLX's affine mode, [out, in] or [experts, out, in]."""
    random = np.random.default_rng(bits)
    codes = random.integers(0, 1 << bits, shape)
    grid = (*shape[:-1], shape[-1] // size)
    scale, bias = numbers(random, torch.bfloat16, *grid), numbers(random, torch.bfloat16, *grid)
    right = np.empty(shape, np.float32)
    for place in np.ndindex(*shape):
        group = (*place[:-1], place[-1] // size)
        right[place] = np.float32(codes[place]) * floats(scale)[group] + floats(bias)[group]
    held = packed(codes.reshape(-1, shape[-1]), bits).reshape(*shape[:-1], -1)
    tensors = {f"{name}.weight": torch.from_numpy(held), f"{name}.scales": scale, f"{name}.biases": bias}
    return Made(tensors, {f"{name}.weight": right}, {"quantization": {"bits": bits, "group_size": size}})


def mlx_float(mode: str = "mxfp4", whole: float | None = None) -> Made:
    """A weight [40, 64] in one of MLX's modes with floats as codes. whole: a scale for the tensor."""
    random = np.random.default_rng(3)
    bits, size = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}[mode]
    codes = float8_codes(random, 40, 64) if bits == 8 else random.integers(0, 16, (40, 64))
    scale = float8_codes(random, 40, 64 // size) if mode == "nvfp4" else random.integers(100, 150, (40, 64 // size))
    value, factor = (e4m3 if bits == 8 else e2m1), (e4m3 if mode == "nvfp4" else lambda code: 2.0 ** (code - 127))
    of_tensor = np.float32(1 if whole is None else np.float32(whole) / np.float32(6 * 448))
    right = np.empty((40, 64), np.float32)
    for i, j in np.ndindex(40, 64):
        right[i, j] = np.float32(value(int(codes[i, j]))) * (np.float32(factor(int(scale[i, j // size]))) * of_tensor)
    tensors = {"m.weight": torch.from_numpy(packed(codes, bits)), "m.scales": torch.from_numpy(scale.astype(np.uint8))}
    if whole is not None:
        tensors["m.global_scale"] = torch.tensor(whole)
    config = {"quantization": {"bits": bits, "group_size": size, "mode": mode}}
    return Made(tensors, {"m.weight": right}, config)


def torchao_blocks(codes: str = "int4", block: tuple[int, int] = (1, 32), zero: bool = True) -> Made:
    """A weight [40, 64] of torchao with a scale for each block. codes: "int4", "int8" or "e4m3"."""
    random = np.random.default_rng(4)
    rows, columns = 40, 64
    grid = (-(-rows // block[0]), columns // block[1])
    scale = numbers(random, torch.float32, *grid)
    zeros = random.integers(-8, 8, grid) if zero else np.zeros(grid, np.int64)
    if codes == "e4m3":
        held = float8_codes(random, rows, columns)
        values, qdata = np.vectorize(e4m3)(held), torch.from_numpy(held).view(torch.float8_e4m3fn)
    else:
        values = random.integers(-8, 8, (rows, columns))
        qdata = torch.from_numpy(values.astype(np.int8))
    right = np.empty((rows, columns), np.float32)
    for i, j in np.ndindex(rows, columns):
        at = i // block[0], j // block[1]
        right[i, j] = np.float32(values[i, j] - zeros[at]) * floats(scale)[at]
    kind = {"e4m3": "Float8Tensor", "int8": "Int8Tensor", "int4": "IntxUnpackedToInt8Tensor"}[codes]
    data: dict[str, Any] = {"block_size": list(block)}
    if codes == "int4":
        data["target_dtype"] = {"_type": "torch.dtype", "_data": "int4"}
    tensors = {"m._weight_qdata": qdata, "m._weight_scale": scale}
    if zero:
        tensors["m._weight_zero_point"] = torch.from_numpy(zeros.astype(np.int8))
    return Made(tensors, {"m.weight": right}, metadata={"m.weight": json.dumps({"_type": kind, "_data": data})})


def torchao_swizzled(kind: str = "mxfp8", tiles: bool = True) -> Made:
    """A weight [200, 192] of torchao in MXFP8, MXFP4 or NVFP4, whose scales are in the order of tensor cores, or of rows."""
    random = np.random.default_rng(5)
    rows, columns, size = 200, 192, 16 if kind == "nvfp4" else 32
    if kind == "mxfp8":
        codes = float8_codes(random, rows, columns)
        values, qdata = np.vectorize(e4m3)(codes), torch.from_numpy(codes).view(torch.float8_e4m3fn)
    else:
        codes = random.integers(0, 16, (rows, columns))
        values, qdata = np.vectorize(e2m1)(codes), torch.from_numpy(packed(codes, 4, 8))
    grid = (rows, columns // size)
    data = {"block_size": size, "is_swizzled_scales": tiles}
    tensors = {"m._weight_qdata": qdata}
    if kind == "nvfp4":
        scale, whole = float8_codes(random, *grid), np.float32(0.037)
        factors = (np.vectorize(e4m3)(scale).astype(np.float32) * whole).astype(np.float32)
        tensors["m._weight_per_tensor_scale"] = torch.tensor(whole)
    else:
        scale = random.integers(100, 150, grid).astype(np.uint8)
        factors = 2.0 ** (scale.astype(np.float32) - 127)
    right = np.array([[np.float32(values[i, j]) * factors[i, j // size] for j in range(columns)] for i in range(rows)])
    dtype = torch.float8_e4m3fn if kind == "nvfp4" else torch.float8_e8m0fnu
    tensors["m._weight_scale"] = torch.from_numpy(swizzled(scale) if tiles else scale).view(dtype)
    described = {"_type": "NVFP4Tensor" if kind == "nvfp4" else "MXTensor", "_data": data}
    return Made(tensors, {"m.weight": right.astype(np.float32)}, metadata={"m.weight": json.dumps(described)})


def quanto(codes: str = "int8", shape: tuple[int, ...] = (24, 40)) -> Made:
    """A weight of optimum-quanto's 8 bits. codes: "int8" or "e4m3"."""
    random = np.random.default_rng(6)
    if codes == "int8":
        values = random.integers(-128, 128, shape)
        data = torch.from_numpy(values.astype(np.int8))
    else:
        held = float8_codes(random, *shape)
        values, data = np.vectorize(e4m3)(held), torch.from_numpy(held).view(torch.float8_e4m3fn)
    scale = numbers(random, torch.bfloat16, shape[0], *(1 for _ in shape[1:]))
    right = values.astype(np.float32) * floats(scale)
    tensors = {"m.weight._data": data, "m.weight._scale": scale, "m.input_scale": torch.tensor(1.0)}
    return Made(tensors, {"m.weight": right})
