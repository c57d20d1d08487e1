"""Checkpoints of weights with scales for their blocks: those of compressed-tensors, transformers, ModelOpt, DeepSeek, gpt-oss,
ComfyUI and Quark. The right values are in float32 the code, minus its zero point, times the product of its scales.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tests.helpers.quantized.case import E2M1, E4M3, Array, Case, float_values, nibbles, spread, swizzled, words


def _random(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def _fp8_codes(shape: tuple[int, ...], seed: int = 0) -> Array:
    codes = _random(seed).integers(0, 256, shape, dtype=np.uint8)
    codes[(codes & 127) == 127] = 0  # those two are NaN
    return codes


def _as_fp8(codes: Array) -> torch.Tensor:
    return torch.from_numpy(codes).view(torch.float8_e4m3fn)


def _scales(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 1) -> tuple[torch.Tensor, Array]:
    """Return positive scales as they are stored, and in float32."""
    stored = torch.from_numpy(_random(seed).uniform(0.01, 2, shape).astype(np.float32)).to(dtype)
    return stored, stored.to(torch.float32).numpy()


def _exponents(shape: tuple[int, ...], seed: int = 2) -> tuple[torch.Tensor, Array]:
    """Return bytes with exponents plus 127, the smallest included, and their powers of two."""
    codes = _random(seed).integers(100, 150, shape, dtype=np.uint8)
    codes.flat[0] = 0
    return torch.from_numpy(codes), np.ldexp(np.float32(1), codes.astype(np.int32) - 127).astype(np.float32)


def _in_tiles(scales: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(swizzled(scales.view(torch.uint8).numpy())).view(scales.dtype)


def _group(arguments: dict[str, Any], form: str, targets: tuple[str, ...] = ("Linear",)) -> dict[str, Any]:
    return {"format": form, "targets": list(targets), "weights": arguments}


def ct(*groups: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a checkpoint of compressed-tensors."""
    named = {f"group_{index}": group for index, group in enumerate(groups)}
    return {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": named}}


def _ct_words(
    bits: int, shape: tuple[int, int], group: int | None, symmetric: bool, dense: bool = True, order: bool = False
) -> Case:
    rows, columns = shape
    unsigned = _random(bits).integers(0, 2**bits, shape)
    size = columns if group is None else group
    count = -(-columns // size)
    stored, scale = _scales((rows, count), torch.bfloat16)
    tensors = {
        "x.weight_packed": words(unsigned, bits, dense),
        "x.weight_scale": stored,
        "x.weight_shape": torch.tensor(shape),
    }
    index = _random(9).permutation(np.arange(columns) // size) if order else np.arange(columns) // size
    zero = np.full((rows, count), 2 ** (bits - 1))
    if order:
        tensors["x.weight_g_idx"] = torch.from_numpy(index.astype(np.int32))
    if not symmetric:
        zero = _random(3).integers(0, 2**bits, (rows, count))
        tensors["x.weight_zero_point"] = words(zero.T, bits, dense).t().contiguous()
    right = (unsigned - zero[:, index]).astype(np.float32) * scale[:, index]
    arguments = {
        "num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group" if group else "channel",
        "group_size": group, "actorder": "group" if order else None,
    }  # fmt: skip
    kind = f"{'' if symmetric else 'u'}int{bits}@{f'g{group}' if group else 'channel'}"
    return Case(tensors, {"x.weight": right}, f"ct:{kind}", ct(_group(arguments, "pack-quantized")))


def _ct_stacked() -> Case:
    unsigned = _random(7).integers(0, 16, (3, 8, 64))
    stored, scale = _scales((3, 8, 2))
    tensors = {
        "x.weight_packed": torch.stack([words(each, 4) for each in unsigned]),
        "x.weight_scale": stored,
        "x.weight_shape": torch.tensor((3, 8, 64)),
    }
    right = (unsigned - 8).astype(np.float32) * np.repeat(scale, 32, 2)
    arguments = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    return Case(tensors, {"x.weight": right}, "ct:int4@g32", ct(_group(arguments, "pack-quantized")))


def _ct_int8(symmetric: bool) -> Case:
    codes = _random(4).integers(-128, 128, (20, 48), dtype=np.int8)
    stored, scale = _scales((20, 1), torch.float16)
    tensors = {"x.weight": torch.from_numpy(codes), "x.weight_scale": stored, "x.input_scale": torch.ones(1)}
    zero = np.zeros((20, 1), np.int8)
    if not symmetric:
        zero = _random(5).integers(-128, 128, (20, 1), dtype=np.int8)
        tensors["x.weight_zero_point"] = torch.from_numpy(zero)
    right = (codes.astype(np.float32) - zero.astype(np.float32)) * scale
    arguments = {"num_bits": 8, "type": "int", "symmetric": symmetric, "strategy": "channel"}
    kind = "int8" if symmetric else "uint8"
    return Case(tensors, {"x.weight": right}, f"ct:{kind}@channel", ct(_group(arguments, "int-quantized")))


def _ct_fp8(strategy: str, shape: tuple[int, int] = (70, 48)) -> Case:
    block = {"channel": (1, shape[1]), "tensor": shape, "block": (32, 32)}[strategy]
    codes = _fp8_codes(shape)
    stored, scale = _scales((-(-shape[0] // block[0]), -(-shape[1] // block[1])), torch.bfloat16)
    right = E4M3[codes] * spread(scale, block, shape)
    arguments = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "block_structure": [32, 32]}
    tensors = {"x.weight": _as_fp8(codes), "x.weight_scale": stored.view(1) if strategy == "tensor" else stored}
    kind = "32x32" if strategy == "block" else strategy
    return Case(tensors, {"x.weight": right}, f"ct:e4m3@{kind}", ct(_group(arguments, "float-quantized")))


def _ct_floats(bits: int, group: int) -> Case:
    rows, columns = 6, 96
    codes = _random(bits).integers(0, 2**bits, (rows, columns))
    arguments = {
        "num_bits": bits, "type": "float", "symmetric": True, "strategy": "group", "group_size": group,
        "scale_dtype": "torch.uint8",
    }  # fmt: skip
    stored, scale = _exponents((rows, columns // group))
    if bits == 8:
        codes = _fp8_codes((rows, columns))
        tensors = {"x.weight": _as_fp8(codes.astype(np.uint8)), "x.weight_scale": stored}
        values, kind = E4M3, "mxfp8"
    elif bits == 6:
        packed = words(codes, 6).view(torch.uint8).contiguous()
        tensors = {"x.weight_packed": packed, "x.weight_scale": stored}
        values, kind = float_values(2, 3), f"mxfp6_e2m3@g{group}"
    else:
        tensors = {"x.weight_packed": nibbles(codes), "x.weight_scale": stored}
        values, kind = E2M1, "mxfp4"
    if group == 16:
        fp8 = _fp8_codes((rows, columns // group)) & 127
        of_tensor = torch.tensor([1234.5])
        tensors |= {"x.weight_scale": _as_fp8(fp8), "x.weight_global_scale": of_tensor}
        scale, kind = E4M3[fp8] / of_tensor.numpy(), "nvfp4"
        arguments |= {"strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}
    right = values[codes] * spread(scale, (1, group), (rows, columns))
    return Case(tensors, {"x.weight": right}, f"ct:{kind}", ct(_group(arguments, "by-group")))


UE5M3 = float_values(5, 3)[:256]
"""The value of each code of a float without a sign, of 5 bits of exponent and 3 of mantissa. The last stands for NaN."""


def ct_e5m3(rows: int = 6, column: bool = False, columns: int = 80) -> Case:
    """Return NVFP4 as AutoRound stores it with scales in UE5M3. column: whether these are in one column."""
    codes = _random(4).integers(0, 16, (rows, columns))
    stored = _random(5).integers(0, 255, (rows, -(-columns // 16)), dtype=np.uint8)
    stored.flat[:9] = range(9)
    right = E2M1[codes] * spread(UE5M3[stored], (1, 16), codes.shape)
    scale = torch.from_numpy(stored)
    tensors = {"x.weight_packed": nibbles(codes), "x.weight_scale": scale.view(-1, 1) if column else scale}
    arguments = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
    group = _group(arguments, "nvfp4-e5m3-pack-quantized") | {"input_activations": {**arguments, "dynamic": "local"}}
    return Case(tensors, {"x.weight": right}, "ct:nvfp4_e5m3", ct(group))


def fp8_blocks(shape: tuple[int, int] = (130, 136)) -> Case:
    """Return float8 as DeepSeek-V3 has it, by default with a last block that is smaller."""
    codes = _fp8_codes(shape)
    stored, scale = _scales((-(-shape[0] // 128), -(-shape[1] // 128)))
    declared = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    tensors = {"x.weight": _as_fp8(codes), "x.weight_scale_inv": stored}
    right = E4M3[codes] * spread(scale, (128, 128), shape)
    return Case(tensors, {"x.weight": right}, "fp8:e4m3@128x128", {"quantization_config": declared})


def auto_round(case: Case, group_size: object = 16, **more: object) -> Case:
    """Return a case of compressed-tensors as AutoRound declares it in its own format."""
    settings = {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor", "group_size": group_size}
    case.config = {"quantization_config": {**settings, **more}}
    case.format = f"auto-round:{case.format.partition(':')[2]}"
    return case


def _hf_fp8(method: str) -> Case:
    """Return float8 as transformers declares it without blocks: one scale, or one for each row by FBGEMM."""
    codes = _fp8_codes((20, 48))
    stored, scale = _scales((20, 1) if method == "fbgemm_fp8" else ())
    tensors = {"x.weight": _as_fp8(codes), "x.weight_scale": stored, "x.input_scale": torch.tensor(1.0)}
    kind = "channel" if method == "fbgemm_fp8" else "tensor"
    declared = {"quant_method": method, "activation_scheme": "static"}
    return Case(tensors, {"x.weight": E4M3[codes] * scale}, f"fp8:e4m3@{kind}", {"quantization_config": declared})


def modelopt(algorithm: str, **more: object) -> dict[str, Any]:
    """Return the configuration of a checkpoint of ModelOpt."""
    return {"quantization_config": {"quant_method": "modelopt", "quant_algo": algorithm, **more}}


def _modelopt_fp8(algorithm: str, columns: int = 200) -> Case:
    shape = (130, columns)
    codes = _fp8_codes(shape)
    block, scale_shape, kind = {
        "FP8": (shape, (), "tensor"),
        "FP8_PER_CHANNEL_PER_TOKEN": ((1, columns), (130,), "channel"),
        "fp8_pb_wo": ((128, 128), (2, 1, 2, 1), "128x128"),
    }[algorithm]
    stored, scale = _scales(scale_shape)
    tensors = {"x.weight": _as_fp8(codes), "x.weight_scale": stored, "x.input_scale": torch.tensor(1.0)}
    right = E4M3[codes] * spread(scale, block, shape)
    return Case(tensors, {"x.weight": right}, f"modelopt:e4m3@{kind}", modelopt(algorithm))


def _modelopt_fp4(algorithm: str, rows: int = 5) -> Case:
    columns = 64
    codes = _random(6).integers(0, 16, (rows, columns))
    if algorithm.startswith("MX"):
        stored, scale = _exponents((rows, 2))
        tensors, group, kind = {"x.weight": nibbles(codes), "x.weight_scale": stored}, 32, "mxfp4"
    else:
        fp8 = np.maximum(_fp8_codes((rows, 4)) & 127, 1)
        tensors = {"x.weight": nibbles(codes), "x.weight_scale": _as_fp8(fp8), "x.weight_scale_2": torch.tensor(0.0037)}
        scale, group, kind = E4M3[fp8] * np.float32(0.0037), 16, "nvfp4"
    right = E2M1[codes] * spread(scale, (1, group), (rows, columns))
    if algorithm.endswith("AWQ"):
        stored, of_columns = _scales((columns,), torch.bfloat16, 8)
        tensors["x.pre_quant_scale"] = stored
        right = right * of_columns
    return Case(tensors, {"x.weight": right}, f"modelopt:{kind}", modelopt(algorithm))


def modelopt_svd(rows: int = 5, begin: str = "x.svdquant_lora_") -> Case:
    """Return NVFP4 with a product of two matrices that is added. All numbers have so few bits that each sum is exact. begin: what
    the names of the two matrices begin with.
    """
    case = _modelopt_fp4("NVFP4_SVD", rows)
    scales = torch.full((rows, 4), 0.5).to(torch.float8_e4m3fn)
    case.tensors |= {"x.weight_scale": scales, "x.weight_scale_2": torch.tensor(0.25)}
    codes = case.tensors["x.weight"].numpy()
    values = E2M1[np.stack((codes & 15, codes >> 4), 2).reshape(rows, 64)] * np.float32(0.125)
    up, down = (_random(seed).integers(-8, 8, shape) for seed, shape in ((1, (rows, 3)), (2, (3, 64))))
    case.tensors |= {f"{begin}b": torch.from_numpy(up).to(torch.bfloat16)}
    case.tensors |= {f"{begin}a": torch.from_numpy(down / 4).to(torch.bfloat16)}
    stored, of_columns = _scales((64,), torch.bfloat16, 8)
    case.tensors["x.pre_quant_scale"] = stored
    right = (values + (up @ down / 4).astype(np.float32)) * of_columns
    return Case(case.tensors, {"x.weight": right}, "modelopt:nvfp4_svd", case.config)


def _modelopt_awq() -> Case:
    rows, columns = 10, 96
    codes = _random(7).integers(-8, 8, (rows, columns))
    stored, scale = _scales((rows, 2))
    tensors = {
        "x.weight": torch.from_numpy((codes[0::2] & 15 | (codes[1::2] & 15) << 4).astype(np.uint8)),
        "x.weight_scale": stored,
    }
    factors, of_columns = _scales((columns,), torch.bfloat16, 8)
    tensors["x.pre_quant_scale"] = factors
    right = codes.astype(np.float32) * spread(scale, (1, 64), (rows, columns)) * of_columns
    more = {"quantization": {"quant_algo": "W4A16_AWQ", "group_size": 64, "pre_quant_scale": True}}
    return Case(tensors, {"x.weight": right}, "modelopt:int4@g64", modelopt("W4A16_AWQ"), hf_quant_config=more)


def _modelopt_mixed() -> Case:
    one, two = _modelopt_fp8("FP8", 64), _modelopt_fp4("NVFP4", 130)
    tensors = {name.replace("x.", "a.0.x."): tensor for name, tensor in one.tensors.items()}
    tensors |= {name.replace("x.", "a.1.x."): tensor for name, tensor in two.tensors.items()}
    layers = {"a.0.x": {"quant_algo": "FP8"}, "a.1*": {"quant_algo": "NVFP4", "group_size": 16}}
    right = {"a.0.x.weight": one.right["x.weight"], "a.1.x.weight": two.right["x.weight"]}
    more = {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}}
    return Case(tensors, right, "modelopt:e4m3@tensor", {}, hf_quant_config=more)


FP4_EXPERT = "layers.0.ffn.experts.0.w1.weight"
"""The expert in FP4 of the case "deepseek"."""


def _deepseek_v4() -> Case:
    codes, experts = _fp8_codes((130, 96)), _random(8).integers(0, 16, (16, 96))
    stored, scale = _exponents((2, 1))
    of_experts, fine = _exponents((16, 3))
    tensors = {
        "layers.0.attn.wq_a.weight": _as_fp8(codes),
        "layers.0.attn.wq_a.scale": stored.view(torch.float8_e8m0fnu),
        FP4_EXPERT: nibbles(experts).view(torch.int8),
        FP4_EXPERT.replace("weight", "scale"): of_experts.view(torch.float8_e8m0fnu),
    }
    right = {
        "layers.0.attn.wq_a.weight": E4M3[codes] * spread(scale, (128, 128), (130, 96)),
        FP4_EXPERT: E2M1[experts] * spread(fine, (1, 32), (16, 96)),
    }
    declared = {"quant_method": "fp8", "weight_block_size": [128, 128], "expert_dtype": "fp4"}
    return Case(tensors, right, "deepseek:e4m3@128x128", {"quantization_config": declared})


def _gpt_oss() -> Case:
    codes = _random(9).integers(0, 16, (3, 16, 64))
    stored, scale = _exponents((3, 16, 2))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors = {f"{name}_blocks": nibbles(codes).view(3, 16, 2, 16), f"{name}_scales": stored}
    right = (E2M1[codes] * np.repeat(scale, 32, 2)).transpose(0, 2, 1)
    return Case(tensors, {name: right}, "gpt-oss:mxfp4", {"quantization_config": {"quant_method": "mxfp4"}})


def _comfy(form: str) -> Case:
    rows, columns = 130, 80
    tensors: dict[str, torch.Tensor] = {}
    metadata: dict[str, str] = {}
    about = json.dumps({"format": form.split()[0], "convrot": "rotated" in form, "convrot_groupsize": 16})
    if form == "nvfp4":
        codes, fp8 = _random(3).integers(0, 16, (rows, columns)), _fp8_codes((rows, 5)) & 127
        tensors = {"x.weight": nibbles(codes, True), "x.weight_scale": _in_tiles(_as_fp8(fp8))}
        tensors["x.weight_scale_2"] = torch.tensor(0.017)
        right, kind = E2M1[codes] * spread(E4M3[fp8] * np.float32(0.017), (1, 16), (rows, columns)), "nvfp4"
    elif form == "mxfp8":
        codes, (stored, scale) = _fp8_codes((rows, 96)), _exponents((rows, 3))
        tensors = {"x.weight": _as_fp8(codes), "x.weight_scale": _in_tiles(stored).view(torch.float8_e8m0fnu)}
        right, kind = E4M3[codes] * spread(scale, (1, 32), (rows, 96)), "mxfp8"
    elif form.startswith("int8_tensorwise"):
        codes = _random(3).integers(-128, 128, (rows, columns), dtype=np.int8)
        stored, scale = _scales((rows, 1))
        if "rotated" in form:  # powers of two, so that the order of a sum is of no account
            scale = np.exp2(np.round(np.log2(scale)))
            stored = torch.from_numpy(scale)
        tensors = {"x.weight": torch.from_numpy(codes), "x.weight_scale": stored}
        right, kind = codes.astype(np.float32) * scale, "int8@channel"
        if "rotated" in form:
            four = np.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], np.float64) / 2
            matrix = np.kron(np.eye(columns // 16), np.kron(four, four))
            right, kind = (right.astype(np.float64) @ matrix).astype(np.float32), "rotated_int8@channel"
    else:
        codes, (stored, scale) = _fp8_codes((rows, columns)), _scales((1,))
        old = form in ("scaled_fp8", "scale_weight")
        tensors = {"x.weight": _as_fp8(codes), "x.scale_weight" if old else "x.weight_scale": stored}
        right, kind = E4M3[codes] * scale, "e4m3@tensor"
    if form == "scaled_fp8":
        tensors |= {"scaled_fp8": torch.zeros(2).to(torch.float8_e4m3fn), "x.scale_input": torch.ones(1)}
    elif form == "float8_e4m3fn in metadata":
        metadata["_quantization_metadata"] = json.dumps({"layers": {"x": json.loads(about)}})
    elif form not in ("scale_weight", "no mark"):
        tensors["x.comfy_quant"] = torch.tensor(list(about.encode()), dtype=torch.uint8)
    return Case(tensors, {"x.weight": right}, f"comfy:{kind}", metadata=metadata, alone=True)


def _quark(dtype: str) -> Case:
    rows, columns = 6, 64
    settings: dict[str, Any] = {"dtype": dtype, "qscheme": "per_group", "group_size": 32, "ch_axis": -1}
    stored, scale = _exponents((rows, 2))
    block = (1, 32)
    if dtype == "fp4":
        codes, values, kind = _random(2).integers(0, 16, (rows, columns)), E2M1, "mxfp4"
        packed = nibbles(codes)
    elif dtype == "fp6_e3m2":
        codes, values, kind = _random(2).integers(0, 64, (rows, columns)), float_values(3, 2), "mxfp6_e3m2@g32"
        packed = words(codes, 6).view(torch.uint8).contiguous()
    else:
        stored, scale = _scales((rows,))
        settings |= {"qscheme": "per_channel", "ch_axis": 0, "group_size": None}
        codes, values, kind, block = _fp8_codes((rows, columns)), E4M3, "e4m3@channel", (1, columns)
        packed = _as_fp8(codes)
        if dtype == "int8":
            codes, kind = codes.view(np.int8), "int8@channel"
            packed, values = torch.from_numpy(codes), np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32)
            codes = codes.view(np.uint8)
    right = values[codes] * spread(scale, block, (rows, columns))
    layers = {"*": {"weight": settings}}
    declared = {"quant_method": "quark", "global_quant_config": {}, "layer_quant_config": layers}
    tensors = {"x.weight": packed, "x.weight_scale": stored}
    return Case(tensors, {"x.weight": right}, f"quark:{kind}", {"quantization_config": declared})


def _quark_int4(dtype: str, pack_method: str) -> Case:
    rows, columns, low = 24, 96, -8 if dtype == "int4" else 0
    order = (0, 2, 4, 6, 1, 3, 5, 7) if pack_method == "reorder" else range(8)
    codes = _random(2).integers(low, low + 16, (rows, columns))
    zero = _random(3).integers(low, low + 16, (rows, 3))
    stored, scale = _scales((rows, 3), torch.float16)

    def pack(values: Array) -> torch.Tensor:
        packed = np.zeros((values.shape[1], rows // 8), np.int64)
        for place, row in enumerate(order):
            packed |= (values[row::8].T & 15) << 4 * place
        return torch.from_numpy(packed.astype(np.uint32).view(np.int32))

    tensors = {"x.weight": pack(codes), "x.weight_scale": stored.t().contiguous(), "x.weight_zero_point": pack(zero)}
    right = (codes - np.repeat(zero, 32, 1)).astype(np.float32) * np.repeat(scale, 32, 1)
    declared = {
        "quant_method": "quark", "export": {"pack_method": pack_method},
        "global_quant_config": {"weight": {"dtype": dtype, "qscheme": "per_group", "group_size": 32, "ch_axis": 1}},
    }  # fmt: skip
    return Case(tensors, {"x.weight": right}, f"quark:{dtype}@g32", {"quantization_config": declared})


def modelslim(kind: str, shape: tuple[int, int] = (21, 96), groups: int = 1, half: bool = True) -> Case:
    """Return a weight as msModelSlim stores it. kind: its type in the file with the types of all tensors. half: whether the model
    was in float16, so that the scale of products is stored as the bits of float32 in int64.
    """
    bits, random = 4 if kind.startswith("W4") else 8, _random(4)
    codes = random.integers(-(1 << bits - 1), 1 << bits - 1, shape).astype(np.int8)
    stored, scale = _scales((shape[0], groups))
    tensors = {"weight": torch.from_numpy(codes)}
    if kind in ("W8A8", "W8A8_MIX"):
        of_inputs = torch.tensor([0.0371])
        product = stored[:, 0] * of_inputs
        bias = random.integers(-999, 999, shape[0]).astype(np.int32)
        tensors |= {"input_scale": of_inputs, "input_offset": torch.tensor([3.0]), "quant_bias": torch.from_numpy(bias)}
        tensors["deq_scale"] = product.view(torch.int32).to(torch.int64) if half else product
    if kind == "W8A8":
        right, name = codes.astype(np.float32) * (product.numpy() / np.float32(0.0371))[:, None], "int8@channel"
    elif kind == "W8A8_MXFP8":
        fp8, (stored, scale) = _fp8_codes(shape), _exponents((shape[0], shape[1] // 32))
        tensors = {"weight": _as_fp8(fp8), "weight_scale": stored}
        right, name = E4M3[fp8] * spread(scale, (1, 32), shape), "mxfp8"
    else:
        offset = random.integers(-3, 4, (shape[0], groups)).astype(np.float32)
        tensors |= {"weight_scale": stored, "weight_offset": torch.from_numpy(offset)}
        values, name = codes.astype(np.float32), f"int{bits}@{f'g{shape[1] // groups}' if groups > 1 else 'channel'}"
        if kind == "WFP8AFP8_DYNAMIC":
            fp8, name = _fp8_codes(shape), "e4m3@channel"
            values, tensors["weight"] = E4M3[fp8], _as_fp8(fp8)
        block = (1, shape[1] // groups)
        right = (values - spread(offset, block, shape)) * spread(scale, block, shape)
    case = Case({f"x.{end}": tensor for end, tensor in tensors.items()}, {"x.weight": right}, f"modelslim:{name}")
    types = dict.fromkeys((*case.tensors, *(f"twin.{name}" for name in case.tensors)), kind)
    case.beside = {"quant_model_description.json": {**types, "model_quant_type": kind, "metadata": {}, "group_size": 0}}
    return case


CASES: dict[str, Callable[[], Case]] = {
    "modelslim int8": lambda: modelslim("W8A8_DYNAMIC"),
    "modelslim int8 in groups": lambda: modelslim("W8A16", groups=3),
    "modelslim int8, static": lambda: modelslim("W8A8"),
    "modelslim int8, static and dynamic": lambda: modelslim("W8A8_MIX", half=False),
    "modelslim int4": lambda: modelslim("W4A4_DYNAMIC"),
    "modelslim fp8": lambda: modelslim("WFP8AFP8_DYNAMIC"),
    "modelslim mxfp8": lambda: modelslim("W8A8_MXFP8"),
    "ct int4 in groups": lambda: _ct_words(4, (12, 160), 64, True),
    "ct int4 with zero points": lambda: _ct_words(4, (21, 128), 32, False),
    "ct int4 with ordered columns": lambda: _ct_words(4, (9, 128), 32, False, order=True),
    "ct int4 by rows": lambda: _ct_words(4, (5, 44), None, True),
    "ct int8 in words": lambda: _ct_words(8, (5, 64), 32, False),
    "ct int3 without gaps": lambda: _ct_words(3, (43, 96), 32, False),
    "ct int3 with gaps": lambda: _ct_words(3, (13, 96), 32, False, dense=False),
    "ct int5": lambda: _ct_words(5, (3, 64), 32, True),
    "ct int2": lambda: _ct_words(2, (3, 64), 32, True),
    "ct int4 of one row": lambda: _ct_words(4, (1, 64), 32, False),
    "ct int4 stacked": _ct_stacked,
    "ct int8": lambda: _ct_int8(True),
    "ct int8 with zero points": lambda: _ct_int8(False),
    "ct fp8 by rows": lambda: _ct_fp8("channel"),
    "ct fp8 with one scale": lambda: _ct_fp8("tensor"),
    "ct fp8 in blocks": lambda: _ct_fp8("block"),
    "ct fp8 of one row": lambda: _ct_fp8("block", (1, 48)),
    "ct nvfp4": lambda: _ct_floats(4, 16),
    "ct nvfp4 with e5m3 scales": ct_e5m3,
    "ct nvfp4 with e5m3 scales in a column": lambda: ct_e5m3(7, column=True),
    "ct mxfp4": lambda: _ct_floats(4, 32),
    "ct mxfp6": lambda: _ct_floats(6, 32),
    "ct mxfp8": lambda: _ct_floats(8, 32),
    "auto-round nvfp4": lambda: auto_round(_ct_floats(4, 16), act_data_type="nv_fp4_with_static_gs", act_bits=4),
    "auto-round nvfp4 with e5m3 scales": lambda: auto_round(ct_e5m3(6)),
    "auto-round mxfp4": lambda: auto_round(_ct_floats(4, 32), 32),
    "auto-round mxfp8": lambda: auto_round(_ct_floats(8, 32), 32, act_data_type="mx_fp", act_bits=8),
    "auto-round fp8 by rows": lambda: auto_round(_ct_fp8("channel"), -1),
    "auto-round fp8 in blocks": lambda: auto_round(fp8_blocks(), [128, 128]),
    "fp8 in blocks": fp8_blocks,
    "fp8 with one scale": lambda: _hf_fp8("fp8"),
    "fp8 by rows": lambda: _hf_fp8("fbgemm_fp8"),
    "modelopt fp8": lambda: _modelopt_fp8("FP8"),
    "modelopt fp8 by rows": lambda: _modelopt_fp8("FP8_PER_CHANNEL_PER_TOKEN"),
    "modelopt fp8 in blocks": lambda: _modelopt_fp8("fp8_pb_wo"),
    "modelopt nvfp4": lambda: _modelopt_fp4("NVFP4"),
    "modelopt nvfp4 with factors": lambda: _modelopt_fp4("NVFP4_AWQ"),
    "modelopt nvfp4 with low rank": modelopt_svd,
    "modelopt nvfp4 with low rank, transformers": lambda: modelopt_svd(21, "x.weight_quantizer._svdquant_lora_"),
    "modelopt mxfp4": lambda: _modelopt_fp4("MXFP4"),
    "modelopt int4": _modelopt_awq,
    "modelopt mixed": _modelopt_mixed,
    "deepseek": _deepseek_v4,
    "gpt-oss": _gpt_oss,
    "comfy nvfp4": lambda: _comfy("nvfp4"),
    "comfy mxfp8": lambda: _comfy("mxfp8"),
    "comfy int8": lambda: _comfy("int8_tensorwise"),
    "comfy int8 rotated": lambda: _comfy("int8_tensorwise rotated"),
    "comfy fp8": lambda: _comfy("float8_e4m3fn"),
    "comfy fp8 in metadata": lambda: _comfy("float8_e4m3fn in metadata"),
    "comfy scaled_fp8": lambda: _comfy("scaled_fp8"),
    "comfy scale_weight": lambda: _comfy("scale_weight"),
    "comfy without a mark": lambda: _comfy("no mark"),
    "quark int4": lambda: _quark_int4("int4", "reorder"),
    "quark uint4": lambda: _quark_int4("uint4", "order"),
    "quark fp4": lambda: _quark("fp4"),
    "quark fp6": lambda: _quark("fp6_e3m2"),
    "quark fp8": lambda: _quark("fp8_e4m3"),
    "quark int8": lambda: _quark("int8"),
}
"""A small checkpoint of each way to store a weight."""
