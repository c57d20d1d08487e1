"""Scaled storage against straightforward code: one element, one row, one code at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.helpers import formats

from dtype_engine.core import dtypes
from dtype_engine.runtime.formats import row_blocks
from dtype_engine.runtime.formats.dequantize import dequantize
from dtype_engine.runtime.numerics.quantize import cast_or_quantize, values_in

STORAGE = pytest.mark.parametrize("dtype", dtypes.PER_CHANNEL_SCALES)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def of_every_size(count: int) -> torch.Tensor:
    """Values over the whole range of float32, with every special one among them."""
    generator = torch.Generator().manual_seed(3)
    exponents = torch.rand(count, generator=generator) * 83 - 45
    values = torch.randn(count, generator=generator).sign() * (10 ** exponents.double()).float()
    values[::7] = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 65520.0])[torch.arange(len(values[::7])) % 6]
    return values


def every_value(dtype: str) -> torch.Tensor:
    """What all codes of a storage-only dtype stand for, in float64. int8 is used symmetrically: -128 is left out."""
    codes = torch.arange(256, dtype=torch.uint8).view(getattr(torch, dtype)).double()
    codes = codes[torch.isfinite(codes)]
    return codes[codes >= -127] if dtype == "int8" else codes


@STORAGE
@pytest.mark.parametrize("shape", [(6, 5), (4, 3, 2), (9,), ()])
def test_scale_of_a_channel_is_its_amax_divided_by_the_largest_code(dtype: str, shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    kept, scale = cast_or_quantize(weight, dtype)
    assert scale is not None
    assert kept.shape == weight.shape
    rows = weight.reshape(shape[0], -1) if len(shape) > 1 else weight.reshape(1, -1)
    for row, found in zip(rows, scale, strict=True):
        assert found.item() == pytest.approx(row.abs().max().item() / dtypes.BY_NAME[dtype].max, rel=1e-6)


@STORAGE
@pytest.mark.parametrize("shape", [(6, 5), (4, 3, 2), (9,), (), (0, 4), (3000, 2000)])
def test_tensor_scale_equals_the_scale_of_the_tensor_as_one_row(dtype: str, shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    kept, scale = cast_or_quantize(weight, dtype + "@tensor")
    in_a_row, expected = cast_or_quantize(weight.reshape(-1), dtype)
    assert scale is not None
    assert expected is not None
    assert torch.equal(scale, expected)
    assert scale.shape == (1,)
    assert torch.equal(kept.reshape(-1).view(torch.uint8), in_a_row.view(torch.uint8))
    back = dequantize(kept, scale, torch.float32)
    assert back.shape == weight.shape
    assert torch.equal(back.reshape(-1), dequantize(in_a_row, expected, torch.float32))


@STORAGE
@pytest.mark.parametrize("shape", [(6, 50), (5, 4, 3), (70,)])
def test_each_element_is_quantized_to_the_nearest_code(dtype: str, shape: tuple[int, ...]) -> None:
    weight = normal(*shape)
    kept, scale = cast_or_quantize(weight, dtype)
    assert scale is not None
    by_row = (
        (weight.reshape(shape[0], -1), kept.reshape(shape[0], -1)) if len(shape) > 1 else (weight[None], kept[None])
    )
    for row, codes, step in zip(*by_row, scale.double(), strict=True):
        errors = (every_value(dtype)[:, None] * step - row.double()).abs()
        found = (codes.double() * step - row.double()).abs()
        assert bool((found <= errors.min(0).values * (1 + 1e-5) + 1e-9 * step).all())


@STORAGE
@pytest.mark.parametrize("target", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dequantization_multiplies_in_float32_and_rounds_once(dtype: str, target: torch.dtype) -> None:
    kept, scale = cast_or_quantize(normal(4, 9), dtype)
    assert scale is not None
    by_hand = [
        [np.float32(value) * np.float32(s) for value in row] for row, s in zip(kept.tolist(), scale, strict=True)
    ]
    back = dequantize(kept, scale, target)
    assert back.dtype == target
    assert torch.equal(back, torch.tensor(np.array(by_hand, dtype=np.float32)).to(target))


@STORAGE
def test_quantization_in_chunks_equals_that_of_the_whole_tensor(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = of_every_size(600).reshape(30, 20)
    kept, scale = cast_or_quantize(weight, dtype)
    monkeypatch.setattr(row_blocks, "CHUNK", 70)
    in_parts, scale_in_parts = cast_or_quantize(weight, dtype)
    assert scale is not None
    assert scale_in_parts is not None
    assert torch.equal(in_parts.view(torch.uint8), kept.view(torch.uint8))
    assert torch.equal(scale_in_parts, scale)


@STORAGE
def test_quantized_channels_of_subnormal_values_do_not_become_nan(dtype: str) -> None:
    weight = torch.tensor([[1e-44, 0.0, -1e-45], [1e-40, 5e-41, 0.0], [2e-38, 1e-38, 0.0], [0.0, 0.0, 0.0]])
    kept, scale = cast_or_quantize(weight, dtype)
    assert scale is not None
    back = dequantize(kept, scale, torch.float32)
    smallest = torch.finfo(torch.float32).tiny
    assert bool(((back - weight).abs() <= smallest).all())
    assert bool((back[weight == 0] == 0).all())


@STORAGE
def test_quantized_values_are_within_half_a_step(dtype: str) -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    kept, scale = cast_or_quantize(weight, dtype)
    assert scale is not None
    error = (dequantize(kept, scale, torch.float32) - weight).abs()
    row = dtypes.BY_NAME[dtype]
    step = (
        scale[:, None]
        if dtype == "int8"
        else torch.maximum(weight.abs() * 2.0**-row.mantissa, scale[:, None] * row.tiny)
    )
    assert bool((error <= 0.5001 * step).all())


@STORAGE
def test_rows_with_zeros_or_infinities_keep_their_finite_values_when_quantized(dtype: str) -> None:
    weight = torch.tensor([[0.0, 0.0], [1.0, math.inf], [2.0, -math.inf]])
    kept, scale = cast_or_quantize(weight, dtype)
    assert scale is not None
    back = dequantize(kept, scale, torch.float32)
    assert back[0].tolist() == [0, 0]
    assert back[1].tolist() == pytest.approx([1, 1])
    assert back[2].tolist() == pytest.approx([2, -2])


def test_cast_to_int8_always_has_scales() -> None:
    weight = torch.tensor([[0.3, -0.4], [300.0, 100.0]])
    assert weight.to(torch.int8).tolist()[0] == [0, 0]
    kept, scale = cast_or_quantize(weight, "int8")
    assert scale is not None
    assert kept.tolist() == [[95, -127], [127, 42]]


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_each_row_of_a_stack_of_matrices_has_its_scale(dtype: str) -> None:
    stack = normal(3, 4, 32) * torch.logspace(-3, 3, 12).reshape(3, 4, 1)
    scale = stack.abs().amax(dim=2, keepdim=True) / (127 if dtype == "int8" else 448)
    codes = stack / scale
    codes = codes.round() if dtype == "int8" else codes.to(torch.float8_e4m3fn).float()
    assert torch.equal(values_in(stack, f"{dtype}@row", torch.float32), codes * scale)
    assert torch.equal(values_in(stack[0], f"{dtype}@row", torch.float32), values_in(stack[0], dtype, torch.float32))


@pytest.mark.parametrize("dtype", dtypes.COMPUTE_DTYPES + formats.WHOLE)
@pytest.mark.parametrize("shape", [(6, 5), (4, 3, 2), (9,), ()])
def test_cast_values_equal_dequantized_codes_and_scales(dtype: str, shape: tuple[int, ...]) -> None:
    weight = normal(*shape)
    before = weight.clone()
    values = values_in(weight, dtype, torch.float64)
    if dtype in dtypes.STORAGE_DTYPES:
        codes, scale = cast_or_quantize(weight, dtype)
        assert scale is not None
        assert scale.shape == (dtypes.scale_count(shape, dtype),)
        steps = scale.reshape(-1, *[1] * (len(shape) - 1)) if dtypes.has_channel_scales(shape, dtype) else scale[0]
        if dtype.endswith("@row") and len(shape) > 2:
            steps = scale.reshape(*shape[:-1], 1)
        expected = (codes.to(torch.float32) * steps).double()
    else:
        expected = weight.to(getattr(torch, dtype))
    assert values.dtype == expected.dtype
    assert torch.equal(values, expected)
    values.zero_()
    assert torch.equal(weight, before)  # also where nothing had to be cast
