"""Codes and scales of every format, bit for bit as other programs have them: compressed-tensors, torchao, gguf, transformers,
and the definitions worked out with ml_dtypes and Python's own floats.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import formats
from tests.helpers.paths import DEMO

from dtype_engine.checkpoint import open_checkpoint
from dtype_engine.core import dtypes
from dtype_engine.core.block_formats import CODES, SCALE, SCALE_INV, TENSOR_SCALE, ZERO_POINT
from dtype_engine.runtime.formats import row_blocks
from dtype_engine.runtime.formats.code_packing import pack
from dtype_engine.runtime.formats.quantize_blocks import quantize_chunks, scale_tensors
from dtype_engine.runtime.verify.independent_block_formats import quantize_blocks_independently
from dtype_engine.runtime.weights.checkpoint_weights import source_of


def _weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    gaussian = torch.randn(128, 256, generator=generator)
    checkpoint = open_checkpoint(DEMO)
    matrices = [values for name in checkpoint.weights if (values := source_of(checkpoint, name).read()).ndim == 2]
    trained = torch.cat([values.float().flatten() for values in matrices])
    return {
        "gaussian": gaussian * 0.02,
        "heavy-tailed": gaussian / torch.rand(128, 256, generator=generator).clamp(min=1e-3),
        "constant": torch.full((128, 256), -0.37),
        "zero": torch.zeros(128, 256),
        "small": gaussian * 1e-30,
        "large": gaussian * 1e30,
        "bfloat16": (gaussian * 0.05).bfloat16().float(),
        "trained": trained[: 128 * 256].reshape(128, 256),
    }


WEIGHTS = _weights()
SUBNORMAL = torch.randn(128, 256, generator=torch.Generator().manual_seed(1)) * 1e-40
KINDS = pytest.mark.parametrize("kind", WEIGHTS)


def ours(weight: torch.Tensor, dtype: str) -> dict[str, torch.Tensor]:
    """Return the tensors that an export writes for a weight, by suffix."""
    element = dtypes.BY_NAME[dtype]
    assert element.blocks is not None
    codes: dict[int, torch.Tensor] = {}
    scales: dict[int, Any] = {}

    def keep(_: Any, chunk: Any) -> None:
        codes[chunk.first] = pack(chunk.file_codes(element), element, element.blocks.packing)  # type: ignore[union-attr]
        scales[chunk.first_scale] = chunk.scales

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_blocks, "CHUNK", 10_000)
        of_tensor = quantize_chunks(weight, dtype, keep)
    rest = scale_tensors([scales[key] for key in sorted(scales)], of_tensor, tuple(weight.shape), dtype)
    suffixes = [SCALE_INV if element.blocks.layout == "fp8" else SCALE]
    suffixes += [TENSOR_SCALE] * element.blocks.tensor_scale + [ZERO_POINT] * element.blocks.zero_points
    return dict(zip([CODES, *suffixes], [torch.cat([codes[key] for key in sorted(codes)]), *rest], strict=False))


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same bytes."""
    return torch.equal(
        *(each.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8) for each in (one, other))
    )


_MX = {"type": "float", "symmetric": True, "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
_INT = {"type": "int", "strategy": "group", "scale_dtype": torch.bfloat16}
COMPRESSED_TENSORS = {
    "mxfp8": _MX | {"num_bits": 8},
    "mxfp4": _MX | {"num_bits": 4},
    "nvfp4": {
        "num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16,
        "scale_dtype": torch.float8_e4m3fn,
    },
    "fp8@128x128": {
        "num_bits": 8, "type": "float", "symmetric": True, "strategy": "block", "block_structure": [128, 128],
    },
    "int4@g128": _INT | {"num_bits": 4, "group_size": 128},
    "int4@g32": _INT | {"num_bits": 4, "group_size": 32},
    "int4@g128a": _INT | {"num_bits": 4, "group_size": 128, "symmetric": False},
    "int8@g128": _INT | {"num_bits": 8, "group_size": 128},
}  # fmt: skip


def padded(weight: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return the matrix with zeros added at the bottom and the right, so that its blocks are whole."""
    blocks = dtypes.BY_NAME[dtype].blocks
    assert blocks is not None
    down, across = (-size % block for size, block in zip(weight.shape, (blocks.rows, blocks.columns), strict=True))
    return torch.nn.functional.pad(weight, (0, across, 0, down))


def by_compressed_tensors(weight: torch.Tensor, dtype: str) -> dict[str, torch.Tensor]:
    """What compressed-tensors writes for a float32 matrix, by suffix. One that no block divides is quantized with zeros beside it,
    and its codes are those of its own elements.
    """
    pytest.importorskip("compressed_tensors", "0.20")
    from compressed_tensors.compressors.mx_utils import compress_mx_scale
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    arguments = COMPRESSED_TENSORS[dtype]
    args = QuantizationArgs(**arguments)
    (rows, width), weight = weight.shape, padded(weight, dtype)
    overall = generate_gparam(weight.min(), weight.max()) if dtype == "nvfp4" else None
    if "block_structure" in arguments:
        blocks = weight.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
        low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    else:
        blocks = weight.unflatten(1, (-1, arguments["group_size"]))
        low, high = blocks.amin(-1), blocks.amax(-1)
    scale, zero = calculate_qparams(low, high, args, global_scale=overall)
    codes = quantize(weight, scale, None if args.symmetric else zero, args, global_scale=overall)[:rows, :width]
    if dtype.startswith("int"):
        found = {CODES: pack_to_int32(codes.to(torch.int8), args.num_bits), SCALE: scale.bfloat16()}
        if not args.symmetric:
            found[ZERO_POINT] = pack_to_int32(zero.to(torch.int8), 4, packed_dim=0)
        return found
    found = {CODES: codes.to(torch.float8_e4m3fn) if args.num_bits == 8 else pack_fp4_to_uint8(codes)}
    found[SCALE] = compress_mx_scale(scale, torch.uint8) if dtype.startswith("mx") else scale
    if overall is not None:
        found |= {SCALE: scale.to(torch.float8_e4m3fn), TENSOR_SCALE: overall}
    return found


def assert_equals_compressed_tensors(weight: torch.Tensor, dtype: str) -> None:
    found, expected = ours(weight, dtype), by_compressed_tensors(weight, dtype)
    assert found.keys() >= expected.keys()
    assert [suffix for suffix in expected if not same(found[suffix], expected[suffix])] == []


@pytest.mark.parametrize("kind", [*WEIGHTS, "subnormal"])
@pytest.mark.parametrize("dtype", COMPRESSED_TENSORS)
def test_codes_and_scales_equal_those_of_compressed_tensors(dtype: str, kind: str) -> None:
    assert_equals_compressed_tensors(WEIGHTS.get(kind, SUBNORMAL), dtype)


@pytest.mark.parametrize("dtype", COMPRESSED_TENSORS)
@pytest.mark.parametrize("shape", [(130, 200), (6, 6), (1, 130), (257, 16), (5, 384)])
@pytest.mark.parametrize("size", [0.02, 1e-39, 1e25])
def test_codes_and_scales_of_partial_blocks_equal_those_of_compressed_tensors(
    dtype: str, shape: tuple[int, int], size: float
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(2)) * size
    assert_equals_compressed_tensors(weight, dtype)


@pytest.mark.parametrize("dtype", COMPRESSED_TENSORS)
def test_stacked_matrices_are_quantized_independently(dtype: str) -> None:
    """[3, 70, 200] are three matrices. No block contains values of two of them, but they share the scale of the tensor."""
    weight = torch.randn(3, 70, 200, generator=torch.Generator().manual_seed(3))
    weight[:, 0, 0] = 9.0  # the largest of each, for the scale of the tensor
    found, each = ours(weight, dtype), [by_compressed_tensors(matrix, dtype) for matrix in weight]
    for suffix, whole in found.items():
        if suffix == ZERO_POINT:
            continue  # packed along the rows of all
        expected = each[0][suffix] if suffix == TENSOR_SCALE else torch.cat([one[suffix] for one in each])
        assert same(whole, expected), suffix


@KINDS
@pytest.mark.parametrize("rule", ["floor", "rceil", "even"])
@pytest.mark.parametrize("element", ["mxfp8", "mxfp4"])
def test_mx_codes_with_each_rule_for_scales_equal_those_of_torchao(element: str, rule: str, kind: str) -> None:
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    target = torch.float8_e4m3fn if element == "mxfp8" else torch.float4_e2m1fn_x2
    scale, codes = mx.to_mx(WEIGHTS[kind], target, 32, mx.ScaleCalculationMode(rule))
    found = ours(WEIGHTS[kind], f"{element}:{rule}")
    assert same(found[SCALE], scale)
    assert same(found[CODES], codes)


@pytest.mark.parametrize("rule", ["floor", "rceil", "even"])
@pytest.mark.parametrize("element", ["mxfp8", "mxfp4"])
def test_partial_mx_blocks_equal_those_of_torchao(element: str, rule: str) -> None:
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    target = torch.float8_e4m3fn if element == "mxfp8" else torch.float4_e2m1fn_x2
    for shape in ((130, 200), (6, 6), (1, 130)):
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(2))
        scale, codes = mx.to_mx(padded(weight, element), target, 32, mx.ScaleCalculationMode(rule))
        found = ours(weight, f"{element}:{rule}")
        width = shape[1] if element == "mxfp8" else shape[1] // 2
        assert same(found[SCALE], scale)
        assert same(found[CODES], codes[:, :width])


@pytest.mark.parametrize("kind", [kind for kind in WEIGHTS if kind != "zero"])
def test_nvfp4_codes_and_scales_equal_those_of_torchao(kind: str) -> None:
    """Excepted are tensors whose largest |value| is 0 or subnormal: torchao's tensor scale is 0 then, and ours is 1."""
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    weight = WEIGHTS[kind]
    of_tensor = nvfp4.per_tensor_amax_to_scale(weight.abs().max())
    scale, codes = nvfp4.nvfp4_quantize(weight, 16, of_tensor)
    found = ours(weight, "nvfp4")
    assert same(found[SCALE], scale)
    assert same(found[CODES], codes)
    assert float(found[TENSOR_SCALE]) == pytest.approx(1 / float(of_tensor), rel=3e-7)


@pytest.mark.parametrize("kind", [kind for kind in WEIGHTS if kind != "zero"])
@pytest.mark.parametrize("dtype", ["int4@g128", "int4@g32", "int4@g128a", "int8@g128"])
def test_grouped_integers_equal_those_of_torchao(dtype: str, kind: str) -> None:
    """torchao multiplies by the scale's reciprocal where we divide, so values half-way between two codes may differ."""
    primitives = pytest.importorskip("torchao.quantization.quant_primitives")
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    arguments, weight = COMPRESSED_TENSORS[dtype], WEIGHTS[kind]
    bits, symmetric = arguments["num_bits"], arguments.get("symmetric", True)
    least = -(2 ** (bits - 1)) if symmetric else 0
    given = (1, arguments["group_size"]), torch.int8, least, least + 2**bits - 1
    mapping = primitives.MappingType.SYMMETRIC if symmetric else primitives.MappingType.ASYMMETRIC
    scale, zero = primitives.choose_qparams_affine(
        weight, mapping, *given, eps=float(torch.finfo(torch.float32).tiny), scale_dtype=torch.bfloat16
    )
    codes = primitives.quantize_affine(weight, given[0], scale.float(), zero, *given[1:])
    found = ours(weight, dtype)
    packed = unpack_from_int32(found[CODES], bits, weight.shape).int() + (0 if symmetric else 8)
    assert same(found[SCALE], scale)
    assert int((packed - codes).abs().max()) <= 1
    assert float((packed != codes).float().mean()) < 0.002


@KINDS
def test_mxfp4_floor_values_equal_those_of_llama_cpp(kind: str) -> None:
    """llama.cpp has another layout, so values are compared. Of two equally near values it may take the other."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    weight = WEIGHTS[kind]
    theirs = dequantize(quantize(weight.numpy(), GGMLQuantizationType.MXFP4), GGMLQuantizationType.MXFP4)
    found = values_of(ours(weight, "mxfp4:floor"), "mxfp4:floor", weight.shape).numpy()
    near = np.abs(found.astype(np.float64) - weight.numpy()) == np.abs(theirs.astype(np.float64) - weight.numpy())
    assert bool(((theirs == found) | near).all())


@KINDS
@pytest.mark.parametrize("dtype", ["fp8@128x128", "fp8@128x128:ue8m0"])
def test_fp8_blocks_equal_those_of_transformers(dtype: str, kind: str) -> None:
    """transformers multiplies by 448 / amax where we divide by amax / 448, so float32 scales may differ in the last bit."""
    finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
    from types import SimpleNamespace

    config = SimpleNamespace(weight_block_size=[128, 128], scale_fmt="ue8m0" if "ue8m0" in dtype else "float")
    quantizer = finegrained.Fp8Quantize(SimpleNamespace(quantization_config=config))
    theirs = quantizer._quantize_one("x.weight", WEIGHTS[kind])
    found = ours(WEIGHTS[kind], dtype)
    scale = found[SCALE_INV] if SCALE_INV in found else found[SCALE]
    if "ue8m0" in dtype:
        assert same(scale, theirs["x.weight_scale_inv"])
        assert same(found[CODES], theirs["x.weight"])
    elif kind != "zero":
        assert torch.allclose(scale, theirs["x.weight_scale_inv"], rtol=3e-7, atol=0)
        differing = found[CODES].view(torch.uint8) != theirs["x.weight"].view(torch.uint8)
        assert float(differing.float().mean()) < 1e-3


def values_of(parts: dict[str, torch.Tensor], dtype: str, shape: torch.Size) -> torch.Tensor:
    from dtype_engine.checkpoint.schemes import CodedWeight
    from dtype_engine.checkpoint.schemes.own import SCHEME
    from dtype_engine.runtime.formats.schemes import decode

    weight = CodedWeight("x", tuple(shape), SCHEME, dtype, {})
    return decode(weight, {suffix or "codes": part for suffix, part in parts.items()})


_ELEMENTS = {
    "mxfp8": "float8_e4m3fn",
    "mxfp4": "float4_e2m1fn",
    "mxfp6_e2m3": "float6_e2m3fn",
    "mxfp6_e3m2": "float6_e3m2fn",
}


@KINDS
@pytest.mark.parametrize("name", [name for name in dtypes.STORED_FORMATS if name.startswith("mx")])
def test_mx_codes_and_scales_equal_their_definition_in_ml_dtypes(name: str, kind: str) -> None:
    """A block's exponent by Python's frexp and the threshold that its rule has; elements rounded by ml_dtypes."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    word, _, rule = name.partition(":")
    element = getattr(ml_dtypes, _ELEMENTS[word])
    largest = float(ml_dtypes.finfo(element).max)
    bits = ml_dtypes.finfo(element).nmant
    goes_up = {
        "floor": lambda m: False,
        "rceil": lambda m: m > math.frexp(largest)[0] * 2,
        "even": lambda m: m >= 2 - 2.0 ** -(bits + 1),
        "": lambda m: m >= (2 - 2.0 ** -(bits + 1) if word.startswith("mxfp6") else 1.75),
    }[rule]
    weight = WEIGHTS[kind][:16]
    expected = []
    for block in weight.reshape(-1, 32):
        fraction, exponent = math.frexp(float(block.abs().max()))
        shared = exponent - math.frexp(largest)[1] + goes_up(fraction * 2) if fraction else -127
        scale = 2.0 ** max(-127, min(127, shared))
        scaled = np.clip(block.numpy() / np.float32(scale), -largest, largest)
        expected.append(scaled.astype(element).astype(np.float32) * np.float32(scale))
    from dtype_engine.runtime.numerics.quantize import values_in

    assert np.array_equal(values_in(weight, name, torch.float32).numpy().reshape(-1, 32), np.array(expected))


@KINDS
def test_nvfp4_codes_and_scales_equal_their_definition_in_ml_dtypes(kind: str) -> None:
    """Each step of numpy in float32: 2688 / amax of the tensor, amax / 6 of a block by that in e4m3, elements in e2m1."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    blocks = WEIGHTS[kind].numpy().reshape(-1, 16)
    amax = np.abs(blocks).max()
    of_tensor = np.float32(1) / amax * np.float32(2688) if amax else np.float32(1)
    scale = np.minimum(np.abs(blocks).max(1) / np.float32(6) * of_tensor, 448).astype(ml_dtypes.float8_e4m3fn)
    scale = np.where(scale == 0, np.float32(0.125), scale.astype(np.float32))
    codes = np.clip(blocks / (scale / of_tensor)[:, None], -6, 6).astype(ml_dtypes.float4_e2m1fn)
    found = ours(WEIGHTS[kind], "nvfp4")
    assert float(found[TENSOR_SCALE]) == of_tensor
    assert np.array_equal(found[SCALE].float().numpy().ravel(), scale)
    nibbles = codes.view(np.uint8).reshape(-1, 2)
    assert np.array_equal(found[CODES].numpy().reshape(-1), nibbles[:, 0] | nibbles[:, 1] << 4)


@KINDS
@pytest.mark.parametrize("dtype", ["int4@g128", "int4@g32", "int8@g128"])
def test_grouped_integers_equal_their_definition_in_numpy(dtype: str, kind: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    bits, group = COMPRESSED_TENSORS[dtype]["num_bits"], COMPRESSED_TENSORS[dtype]["group_size"]
    groups = WEIGHTS[kind].numpy().reshape(-1, group)
    scale = (np.abs(groups).max(1) / np.float32((2**bits - 1) / 2)).astype(ml_dtypes.bfloat16)
    scale = np.where(scale == 0, ml_dtypes.finfo(ml_dtypes.bfloat16).eps, scale)
    codes = np.rint(groups / scale.astype(np.float32)[:, None]).clip(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    found = ours(WEIGHTS[kind], dtype)
    assert np.array_equal(found[SCALE].float().numpy().ravel(), scale.astype(np.float32))
    packed = unpack_from_int32(found[CODES], bits, WEIGHTS[kind].shape)
    assert np.array_equal(packed.numpy().reshape(-1, group), codes.astype(np.int8))


SHAPES = [(6, 5), (4, 3, 2), (9,), (), (0, 4), (4, 0), (130, 200), (3, 130, 140), (2, 64, 3, 3)]
STORED = [name for name in formats.BLOCKS if "mxfp6" not in name]


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("shape", SHAPES)
def test_verify_recomputes_exactly_what_export_writes(dtype: str, shape: tuple[int, ...]) -> None:
    """Shapes that no block divides, with values that are not finite, and every size of float32, up to its largest values."""
    for size in (0.02, 1e-39, 1e25, 1.2e38):
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(2)) * size
        flat = weight.view(-1)
        flat[: min(4, len(flat))] = torch.tensor([math.inf, math.nan, -0.0, -math.inf])[: len(flat)]
        found, expected = (
            list(ours(weight, dtype).values()) if weight.numel() else [],
            quantize_blocks_independently(weight, dtype),
        )
        assert sum(part.nbytes for part in expected) == dtypes.nbytes_in(shape, dtype)
        for one, other in zip(found, expected, strict=False):
            nan = one.float().isnan() if one.dtype == torch.float8_e4m3fn else torch.zeros(one.shape, dtype=torch.bool)
            other = other.reshape(one.shape)
            assert same(
                one.view(torch.uint8)[~nan] if nan.any() else one, other.view(torch.uint8)[~nan] if nan.any() else other
            )
