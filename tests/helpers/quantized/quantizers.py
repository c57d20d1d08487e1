"""Checkpoints in the layouts of GPTQ, AWQ, bitsandbytes, HQQ, MLX, torchao and optimum-quanto."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tests.helpers.quantized.case import E2M1, E4M3, Case, floats, nibbles, spread, swizzled, text, words


def numbers(random: np.random.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return positive random factors."""
    return torch.from_numpy(random.uniform(0.01, 0.1, shape)).to(dtype)


def float8_codes(random: np.random.Generator, *shape: int) -> np.ndarray[Any, Any]:
    """Return random codes of float8_e4m3fn that are not NaN, as uint8."""
    return random.choice(np.array([code for code in range(256) if code & 127 != 127], np.uint8), shape)


_PLANES = {3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}
"""Widths of the planes of `gptq_p`, from the table in GPTQModel's docs/gptq_planar.md."""


def in_planes(codes: np.ndarray[Any, Any], bits: int) -> torch.Tensor:
    """Pack unsigned codes [rows, columns] as `gptq_p` packs them: for every 32 codes of a row, a plane of each width in turn."""
    blocks = []
    for block in np.split(codes, codes.shape[1] // 32, axis=1):
        for width in _PLANES.get(bits, (bits,)):
            blocks.append(words(block % 2**width, width))
            block = block // 2**width
    return torch.cat(blocks, 1)


def gptq(bits: int = 4, form: str = "gptq", size: int = 32, columns: int = 96, order: str = "none") -> Case:
    """A weight [64, columns] in GPTQ's layout. form: "gptq" stores zero points minus one, "gptq_v2" as they are, and "gptq_p" also
    splits codes into planes. order: "none" for a file without g_idx, "regular" or "shuffled".
    """
    random, pack = np.random.default_rng(bits), in_planes if form == "gptq_p" else words
    each = columns if size == -1 else size
    groups, rows = -(-columns // each), 64
    codes, zeros = (random.integers(0, 1 << bits, (rows, extent)) for extent in (columns, groups))
    scale = numbers(random, torch.float16, groups, rows)
    group = np.arange(columns) // each
    if order == "shuffled":
        group = random.permutation(group)
    right = (codes - zeros[:, group]).astype(np.float32) * floats(scale).T[:, group]
    less = int(form == "gptq")
    if bits == 3 or form == "gptq_p":
        stored = pack((zeros.T - less) % 2**bits, bits)
    else:  # whole words are subtracted
        ones = int("1".zfill(bits) * (32 // bits), 2)
        stored = torch.from_numpy(
            (words(zeros.T, bits).numpy().view(np.uint32) - np.uint32(less * ones)).view(np.int32)
        )
    tensors = {"m.qweight": pack(codes, bits).t(), "m.qzeros": stored, "m.scales": scale}
    if order != "none":
        tensors["m.g_idx"] = torch.from_numpy(group.astype(np.int32))
    declared = {"quant_method": "gptq", "bits": bits, "group_size": size, "checkpoint_format": form}
    kind = f"gptq:int{bits}@{'channel' if size == -1 else f'g{size}'}"
    return Case(tensors, {"m.weight": right}, kind, {"quantization_config": declared})


def awq(layout: str = "gemm", size: int = 32) -> Case:
    """A weight [64, 128] in one of AWQ's layouts. In "gemv_fast", an offset is stored: minus the zero point, times the scale."""
    random = np.random.default_rng(0)
    rows, columns, groups = 64, 128, 128 // size
    codes, zeros = (random.integers(0, 16, (rows, extent)) for extent in (columns, groups))
    scale = numbers(random, torch.float16, rows, groups)
    right = (codes - zeros.repeat(size, 1)).astype(np.float32) * floats(scale).repeat(size, 1)
    if layout == "gemm":
        places = np.arange(rows).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(-1)
        tensors = {"m.qweight": words(codes.T[:, places], 4), "m.qzeros": words(zeros.T[:, places], 4)}
        tensors["m.scales"] = scale.t()
    elif layout == "gemv_fast":
        # 32 codes of a row in the order of the kernel; 64 codes of each of four rows in turn
        place = np.array([8 * i + 2 * j + t for j in range(4) for t in range(2) for i in range(4)])
        ordered = codes.reshape(rows, -1, 32)[:, :, place].reshape(rows // 4, 4, -1, 64).swapaxes(1, 2)
        offset = -(scale.float() * torch.from_numpy(zeros)).half()
        unused = 8 * max(128 // size, 1) - groups
        tensors = {"m.qweight": words(ordered.reshape(rows // 4, -1), 4).view(torch.int16)}
        for name, each in (("scales", scale), ("qzeros", offset)):
            tensors[f"m.{name}"] = torch.nn.functional.pad(each, (0, unused)).t()
        right = codes.astype(np.float32) * floats(scale).repeat(size, 1) + floats(offset).repeat(size, 1)
    else:
        unused = 8 * max(128 // size, 1) - groups
        tensors = {"m.qweight": words(codes, 4), "m.qzeros": words(np.pad(zeros, ((0, 0), (0, unused))), 4)}
        tensors["m.scales"] = torch.nn.functional.pad(scale, (0, unused))
    declared = {"quant_method": "awq", "bits": 4, "group_size": size, "version": layout}
    return Case(tensors, {"m.weight": right}, f"awq:int4@g{size}", {"quantization_config": declared})


def bnb_4bit(shape: tuple[int, ...] = (24, 128), kind: str = "nf4", nested: bool = False) -> Case:
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
    return Case(tensors, {"m.weight": right.reshape(shape)}, f"bnb:{kind}@64")


def bnb_8bit() -> Case:
    """A weight [24, 40] of bitsandbytes' 8 bits."""
    random = np.random.default_rng(2)
    codes, scale = random.integers(-127, 128, (24, 40)), random.uniform(1, 2, 24).astype(np.float32)
    right = codes.astype(np.float32) * scale[:, None] / np.float32(127)
    tensors = {"m.weight": torch.from_numpy(codes.astype(np.int8)), "m.SCB": torch.from_numpy(scale)}
    return Case(
        tensors | {"m.weight_format": torch.tensor(0, dtype=torch.uint8)}, {"m.weight": right}, "bnb:int8@channel"
    )


_HQQ = {8: ("8bit_u8", 1), 4: ("4bit_u8", 2), 3: ("3bit_32", 10), 2: ("2bit_u8", 4), 1: ("1bit_u8", 8)}


def hqq(bits: int = 4, axis: int = 1, size: int = 16) -> Case:
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
    return Case({f"m.{key}": tensor for key, tensor in tensors.items()}, {"m.weight": right}, f"hqq:int{bits}@g{size}")


_SINQ = {**_HQQ, 5: ("5bit_32", 6), 6: ("6bit_32", 5)}


def sinq(
    bits: int = 4,
    shape: tuple[int, int] = (32, 48),
    size: int = 16,
    dtype: torch.dtype = torch.float16,
    plain: bool = False,
) -> Case:
    """A weight in SINQ's layout, with a scale for each group and for each column. plain: whether the scales and zero points of
    groups are floats, and not quantized to 8 bits, which needs a multiple of 32 groups.
    """
    random, (rows, columns), (packing, together) = np.random.default_rng(bits), shape, _SINQ[bits]
    groups = rows * columns // size
    matrix = random.integers(0, 1 << bits, (groups, size))
    of_groups, tensors = {}, {}
    for role, high in (("scale", 0.1), ("zero", 1 << bits)):
        tiles = (1, 1 if role == "zero" else groups // 32)
        if plain:
            held = torch.from_numpy(random.uniform(0.01, high, (groups, 1))).to(dtype)
            tensors[f"m.meta.{role}"], of_groups[role] = held, floats(held)
            continue
        small = random.integers(0, 256, (groups // tiles[1], tiles[1]), dtype=np.uint8)
        step, low = (torch.from_numpy(random.uniform(0.1, 1, tiles) * high / 256).to(dtype) for _ in range(2))
        tensors |= {f"m.meta.{role}.{end}": part for end, part in zip("sm", (step, low), strict=True)}
        tensors[f"m.meta.{role}.x"] = torch.from_numpy(small)
        of_groups[role] = (small * floats(step) + floats(low)).reshape(groups, 1)
    of_columns = torch.from_numpy(random.uniform(0.5, 2, (1, columns))).to(dtype)
    grouped = (matrix.astype(np.float32) - of_groups["zero"]) * of_groups["scale"]
    right = grouped.reshape(shape) * floats(of_columns)
    count = -(-groups // together)
    codes = np.zeros((count, size), np.int64)
    for place, row in enumerate(matrix):
        codes[place % count] |= row << (bits * (together - 1 - place // count))
    packed = torch.from_numpy(codes.astype(np.int32 if packing.endswith("32") else np.uint8))
    tensors |= {"m.W_q": packed, "m.meta.scale2": of_columns}
    meta = {
        "nbits": bits, "group_size": size, "shape": list(shape), "axis": 1, "packing": packing,
        "method": "dual" if plain else "sinq_quantAux",
        "awq_scale": None, "compute_dtype": "torch.float16", "unpack_view_dtype": "torch.uint8", "view_as_float": False,
    }  # fmt: skip
    case = Case(tensors, {"m.weight": right}, f"sinq:int{bits}@{'channel' if size == columns else f'g{size}'}")
    case.config = {"quantization_config": {"quant_method": "sinq", "nbits": bits, "group_size": size, "method": "sinq"}}
    case.beside = {"model.safetensors.index.json.meta.json": {"m": {"meta": meta}}}
    return case


def mlx_affine(
    bits: int = 4, size: int = 32, name: str = "m", shape: tuple[int, ...] = (40, 64), metal: bool = False
) -> Case:
    """A weight in MLX's affine mode, [out, in] or [experts, out, in]. metal: whether it is declared and named as transformers does
    for its method "metal".
    """
    random = np.random.default_rng(bits)
    codes = random.integers(0, 1 << bits, shape)
    grid = (*shape[:-1], shape[-1] // size)
    scale, bias = numbers(random, torch.bfloat16, *grid), numbers(random, torch.bfloat16, *grid)
    of_columns, plus = (floats(each).repeat(size, -1) for each in (scale, bias))
    right = codes.astype(np.float32) * of_columns + plus
    held = words(codes.reshape(-1, shape[-1]), bits).view(torch.uint32).view(*shape[:-1], -1)
    tensors = {f"{name}.weight": held, f"{name}.scales": scale, f"{name}.{'q' * metal}biases": bias}
    declared: dict[str, Any] = {"quantization": {"bits": bits, "group_size": size}}
    if metal:
        declared = {"quantization_config": {"quant_method": "metal", **declared["quantization"]}}
    return Case(tensors, {f"{name}.weight": right}, f"mlx:affine{bits}@g{size}", declared)


def mlx_experts(
    name: str = "model.layers.0.mlp.switch_mlp.up_proj", own: str = "mlp.experts.{}.up_proj.weight"
) -> Case:
    """Three experts [24, 64] in a stack, each of which is a weight. own: the end of an expert's name."""
    case = mlx_affine(name=name, shape=(3, 24, 64))
    (stack,) = case.right.values()
    layer = name.partition("0.")[0] + "0."
    return dataclasses.replace(case, right={layer + own.format(index): each for index, each in enumerate(stack)})


def mlx_float(mode: str = "mxfp4", whole: float | None = None) -> Case:
    """A weight [40, 64] in one of MLX's modes with floats as codes. whole: a scale for the tensor."""
    random = np.random.default_rng(3)
    bits, size = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}[mode]
    codes = float8_codes(random, 40, 64) if bits == 8 else random.integers(0, 16, (40, 64))
    scale = float8_codes(random, 40, 64 // size) if mode == "nvfp4" else random.integers(100, 150, (40, 64 // size))
    of_tensor = np.float32(1 if whole is None else np.float32(whole) / np.float32(6 * 448))
    factors = E4M3[scale] if mode == "nvfp4" else np.ldexp(np.float32(1), scale - 127)
    right = (E4M3 if bits == 8 else E2M1)[codes] * (factors * of_tensor).repeat(size, 1)
    tensors = {"m.weight": words(codes, bits).view(torch.uint32), "m.scales": torch.from_numpy(scale.astype(np.uint8))}
    if whole is not None:
        tensors["m.global_scale"] = torch.tensor(whole)
    config = {"quantization": {"bits": bits, "group_size": size, "mode": mode}}
    return Case(tensors, {"m.weight": right}, f"mlx:{mode}", config)


def torchao_blocks(codes: str = "int4", block: tuple[int, int] = (1, 32), zero: bool = True) -> Case:
    """A weight [40, 64] of torchao with a scale for each block. codes: "int4", "int8" or "e4m3"."""
    random = np.random.default_rng(4)
    rows, columns = 40, 64
    grid = (-(-rows // block[0]), columns // block[1])
    scale = numbers(random, torch.float32, *grid)
    zeros = random.integers(-8, 8, grid) if zero else np.zeros(grid, np.int64)
    if codes == "e4m3":
        held = float8_codes(random, rows, columns)
        values, qdata = E4M3[held], torch.from_numpy(held).view(torch.float8_e4m3fn)
    else:
        values = random.integers(-8, 8, (rows, columns))
        qdata = torch.from_numpy(values.astype(np.int8))
    right = (values - spread(zeros, block, values.shape)).astype(np.float32)
    right *= spread(floats(scale), block, values.shape)
    kind = {"e4m3": "Float8Tensor", "int8": "Int8Tensor", "int4": "IntxUnpackedToInt8Tensor"}[codes]
    data: dict[str, Any] = {"block_size": list(block)}
    if codes == "int4":
        data["target_dtype"] = {"_type": "torch.dtype", "_data": "int4"}
    tensors = {"m._weight_qdata": qdata, "m._weight_scale": scale}
    if zero:
        tensors["m._weight_zero_point"] = torch.from_numpy(zeros.astype(np.int8))
    size = f"{block[0]}x{block[1]}" if block[0] > 1 else f"g{block[1]}"
    size = {(1, columns): "channel", (rows, columns): "tensor"}.get(block, size)
    metadata = {"m.weight": json.dumps({"_type": kind, "_data": data})}
    return Case(tensors, {"m.weight": right}, f"torchao:{codes}@{size}", metadata=metadata)


def torchao_swizzled(kind: str = "mxfp8", tiles: bool = True) -> Case:
    """A weight [200, 192] of torchao in MXFP8, MXFP4 or NVFP4, whose scales are in the order of tensor cores, or of rows."""
    random = np.random.default_rng(5)
    rows, columns, size = 200, 192, 16 if kind == "nvfp4" else 32
    if kind == "mxfp8":
        codes = float8_codes(random, rows, columns)
        values, qdata = E4M3[codes], torch.from_numpy(codes).view(torch.float8_e4m3fn)
    else:
        codes = random.integers(0, 16, (rows, columns))
        values, qdata = E2M1[codes], nibbles(codes)
    grid = (rows, columns // size)
    data = {"block_size": size, "is_swizzled_scales": tiles}
    tensors = {"m._weight_qdata": qdata}
    if kind == "nvfp4":
        scale, whole = float8_codes(random, *grid) & 127, np.float32(0.037)
        factors = E4M3[scale] * whole
        tensors["m._weight_per_tensor_scale"] = torch.tensor(whole)
    else:
        scale = random.integers(100, 150, grid).astype(np.uint8)
        factors = np.ldexp(np.float32(1), scale.astype(np.int32) - 127)
    right = values * factors.repeat(size, 1)
    dtype = torch.float8_e4m3fn if kind == "nvfp4" else torch.float8_e8m0fnu
    tensors["m._weight_scale"] = torch.from_numpy(swizzled(scale) if tiles else scale).view(dtype)
    described = {"_type": "NVFP4Tensor" if kind == "nvfp4" else "MXTensor", "_data": data}
    return Case(tensors, {"m.weight": right}, f"torchao:{kind}", metadata={"m.weight": json.dumps(described)})


def quanto(codes: str = "int8", shape: tuple[int, ...] = (24, 40)) -> Case:
    """A weight of optimum-quanto's 8 bits. codes: "int8" or "e4m3"."""
    random = np.random.default_rng(6)
    if codes == "int8":
        values = random.integers(-128, 128, shape)
        data = torch.from_numpy(values.astype(np.int8))
    else:
        held = float8_codes(random, *shape)
        values, data = E4M3[held], torch.from_numpy(held).view(torch.float8_e4m3fn)
    scale = numbers(random, torch.bfloat16, shape[0], *(1 for _ in shape[1:]))
    right = values.astype(np.float32) * floats(scale)
    tensors = {"m.weight._data": data, "m.weight._scale": scale, "m.input_scale": torch.tensor(1.0)}
    return Case(tensors, {"m.weight": right}, f"quanto:{codes}@channel")


def quanto_bits(bits: int = 4, shape: tuple[int, int] = (24, 192), whole: bool = False) -> Case:
    """A weight `up_proj` of optimum-quanto's 4 or 2 bits. whole: whether the shifts are integers."""
    random = np.random.default_rng(bits)
    size = next((each for each in (128, 96, 64, 32) if shape[1] > 128 and shape[1] % each == 0), shape[1])
    groups = shape[0] * shape[1] // size
    codes = random.integers(0, 1 << bits, (groups, size))
    scale = numbers(random, torch.bfloat16, groups, 1)
    if whole:
        shift = torch.from_numpy(random.integers(0, 1 << bits, (groups, 1)).astype(np.int8))
        right = (codes - shift.numpy()).astype(np.float32) * floats(scale)
    else:
        shift = numbers(random, torch.bfloat16, groups, 1)
        right = codes.astype(np.float32) * floats(scale) - floats(shift)
    stored = -(-groups * bits // 8)
    packed = np.zeros((stored, size), np.uint8)
    for place, row in enumerate(codes):
        packed[place % stored] |= (row << place // stored * bits).astype(np.uint8)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = {f"{name}._data._data": torch.from_numpy(packed), f"{name}._scale": scale, f"{name}._shift": shift}
    kind = f"quanto:int{bits}@{'channel' if size == shape[1] else f'g{size}'}"
    return Case(tensors, {name: right.reshape(shape)}, kind, {"hidden_size": shape[1]})


def torchao_int4(size: int = 32) -> Case:
    """A weight [40, 64] of torchao's `Int4Tensor`."""
    random = np.random.default_rng(8)
    codes = random.integers(-8, 8, (40, 64))
    scale, offset = (numbers(random, torch.bfloat16, 64 // size, 40) for _ in range(2))
    factors, more = (floats(each).T.repeat(size, 1) for each in (scale, offset))
    held = {"qdata": nibbles(codes & 15).view(torch.int8), "scale": scale, "zero_point": offset}
    described = {"_type": "Int4Tensor", "_data": {"block_size": [1, size]}}
    return Case(
        {f"m._weight_{end}": tensor for end, tensor in held.items()},
        {"m.weight": codes.astype(np.float32) * factors + more},
        f"torchao:int4@g{size}",
        metadata={"m.weight": json.dumps(described)},
    )


def gemma(bits: int = 4, groups: int = 1, shape: tuple[int, int] = (24, 80), embedding: bool = False) -> Case:
    """A weight as transformers stores it for quantized Gemma. groups: those of a row. embedding: whether it is an embedding."""
    random = np.random.default_rng(9)
    codes = random.integers(-(1 << bits - 1), 1 << bits - 1, shape)
    scale = numbers(random, torch.float32, shape[0], groups)
    right = codes.astype(np.float32) * floats(scale).repeat(shape[1] // groups, 1)
    if bits == 8:
        held = torch.from_numpy(codes.astype(np.int8))
    else:
        together = 8 // bits
        places = (codes + (1 << bits - 1)).reshape(shape[0], -1, together) << bits * np.arange(together)
        held = torch.from_numpy(places.sum(2).astype(np.uint8))
    names = ("embedding_quantized", "embedding_scale") if embedding else ("weight", "weight_scale")
    tensors = {f"m.{name}": tensor for name, tensor in zip(names, (held, scale), strict=True)}
    if not embedding:
        tensors |= {f"m.{end}put_activation_scale": torch.tensor(0.0) for end in ("in", "out")}
    settings = {"quant_method": "gemma", "num_bits": 4, "module_quant_configs": {"^m$": {"num_bits": bits}}}
    form = f"gemma:int{bits}@{'channel' if groups == 1 else f'g{shape[1] // groups}'}"
    return Case(tensors, {"m.weight": right}, form, {"quantization_config": settings})


CASES: dict[str, Callable[[], Case]] = {
    "gptq": gptq,
    "gptq 3 bits, version 2": lambda: gptq(3, "gptq_v2"),
    "gptq 8 bits, ordered columns": lambda: gptq(8, order="shuffled"),
    "gptq 5 bits in planes": lambda: gptq(5, "gptq_p"),
    "awq": awq,
    "awq gemv": lambda: awq("gemv"),
    "awq gemv_fast": lambda: awq("gemv_fast"),
    "bnb nf4": bnb_4bit,
    "bnb nf4 nested": lambda: bnb_4bit(nested=True),
    "bnb fp4": lambda: bnb_4bit(kind="fp4"),
    "bnb int8": bnb_8bit,
    "gemma int4": gemma,
    "gemma int2": lambda: gemma(2),
    "gemma int8": lambda: gemma(8),
    "hqq": hqq,
    "hqq 3 bits along columns": lambda: hqq(3, axis=0),
    "sinq": sinq,
    "sinq with plain scales": lambda: sinq(plain=True),
    "mlx affine": mlx_affine,
    "mlx affine, 3 bits": lambda: mlx_affine(3),
    "mlx affine of transformers": lambda: mlx_affine(8, metal=True),
    "mlx experts": mlx_experts,
    "mlx mxfp4": mlx_float,
    "mlx mxfp8": lambda: mlx_float("mxfp8"),
    "mlx nvfp4": lambda: mlx_float("nvfp4", whole=1.5),
    "torchao int4": torchao_blocks,
    "torchao int4, offsets": torchao_int4,
    "torchao int8": lambda: torchao_blocks("int8", (1, 64)),
    "torchao fp8": lambda: torchao_blocks("e4m3", (32, 32), False),
    "torchao mxfp8": torchao_swizzled,
    "torchao mxfp4": lambda: torchao_swizzled("mxfp4"),
    "torchao nvfp4": lambda: torchao_swizzled("nvfp4", tiles=False),
    "quanto int8": quanto,
    "quanto fp8": lambda: quanto("e4m3"),
    "quanto int4": quanto_bits,
    "quanto int2": lambda: quanto_bits(2),
}
"""A small checkpoint of each way to store a weight, which is called `m.weight` unless it is an expert."""
