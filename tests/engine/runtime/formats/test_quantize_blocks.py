"""Weights in formats with blocks: what comes back, what is counted, and the same whatever the chunks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tests.helpers import formats
from tests.helpers.peak_memory import peak_anonymous

from dtype_engine.core import dtypes
from dtype_engine.core.block_formats import matrices
from dtype_engine.runtime.formats import row_blocks
from dtype_engine.runtime.formats.dequantize import dequantize
from dtype_engine.runtime.numerics.overflow_underflow import count_losses
from dtype_engine.runtime.numerics.quantization_error import round_trip
from dtype_engine.runtime.numerics.quantize import cast_or_quantize, values_in

NAMES = list(formats.BLOCKS)
FORMATS = pytest.mark.parametrize("dtype", NAMES)
SHAPES = [(6, 5), (4, 3, 2), (9,), (), (0, 3), (130, 200), (3, 130, 140)]


def normal(*shape: int, size: float = 0.02) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * size


def by_element(codes: torch.Tensor, scale: torch.Tensor, dtype: str) -> torch.Tensor:
    """Every code times the scale of the block that it lies in, one after the other."""
    blocks = dtypes.BY_NAME[dtype].blocks
    assert blocks is not None
    count, height, width = matrices(codes.shape, blocks.columns)
    down = -(-height // blocks.rows)
    rows = codes.float().reshape(count, height, width)
    values = torch.empty_like(rows)
    for matrix in range(count):
        for row in range(height):
            scales = scale[matrix * down + row // blocks.rows].double()
            for start in range(0, width, blocks.columns):
                part = slice(start, start + blocks.columns)
                values[matrix, row, part] = (rows[matrix, row, part].double() * scales[start // blocks.columns]).float()
    return values.reshape(codes.shape)


@FORMATS
@pytest.mark.parametrize("shape", SHAPES)
def test_block_values_equal_code_times_scale(dtype: str, shape: tuple[int, ...]) -> None:
    weight = normal(*shape)
    codes, scale = cast_or_quantize(weight, dtype)
    assert scale is not None
    assert codes.shape == weight.shape
    assert scale.numel() == dtypes.scale_count(shape, dtype)
    expected = by_element(codes, scale, dtype)
    for compute in (torch.float32, torch.bfloat16):
        assert torch.equal(values_in(weight, dtype, compute), expected.to(compute))


@FORMATS
def test_block_quantization_does_not_depend_on_chunk_size(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = normal(300, 70)
    codes, scale = cast_or_quantize(weight, dtype)
    whole = round_trip("w", weight, dtype)
    assert scale is not None
    values = dequantize(codes, scale, torch.float32, dtypes.BY_NAME[dtype].blocks)
    monkeypatch.setattr(row_blocks, "CHUNK", 500)
    in_parts, scale_in_parts = cast_or_quantize(weight, dtype)
    assert scale_in_parts is not None
    assert torch.equal(codes.view(torch.uint8), in_parts.view(torch.uint8))
    assert torch.equal(scale, scale_in_parts)
    assert torch.equal(dequantize(codes, scale, torch.float32, dtypes.BY_NAME[dtype].blocks), values)
    assert round_trip("w", weight, dtype).max_abs == whole.max_abs


MX = [name for name in NAMES if name.startswith("mx")]
_FLOATS = st.floats(-(2.0**60), 2.0**60, width=32)


@given(arrays("float32", (3, 40), elements=_FLOATS), st.sampled_from(MX))
@settings(max_examples=60)
def test_block_quantization_of_representable_values_changes_nothing(weight: object, dtype: str) -> None:
    """Powers of two as scales round nothing, so what came back once comes back the same; but for blocks that the rule would
    scale otherwise, now that their largest value was rounded.
    """
    once = values_in(torch.from_numpy(weight), dtype, torch.float32)
    twice = values_in(once, dtype, torch.float32)
    again = values_in(twice, dtype, torch.float32)
    assert torch.equal(twice, again)


@given(arrays("float32", (3, 40), elements=_FLOATS), st.sampled_from(NAMES))
@settings(max_examples=60)
def test_block_quantization_errors_are_at_most_half_a_step(weight: object, dtype: str) -> None:
    tensor = torch.from_numpy(weight)
    row = dtypes.BY_NAME[dtype]
    back = values_in(tensor, dtype, torch.float32)
    assert bool(torch.isfinite(back).all())
    # A whole step at the top of a float is 2^-mantissa of a value; floor and the others clamp up to a quarter of it.
    step = {4: 0.5, 6: 0.25, 8: 0.25}[row.bits] if row.kind == "float" else 0.15
    blocks = row.blocks
    assert blocks is not None
    for start in range(0, 40, blocks.columns):
        part = slice(start, start + blocks.columns)
        rows = slice(None) if blocks.rows > 1 else None
        for index in [rows] if rows is not None else range(3):
            values = tensor[index, part]
            amax = float(tensor.abs().max()) if dtype == "nvfp4" else float(values.abs().max())
            assert float((back[index, part] - values).abs().max()) <= step * amax + 1e-37


@FORMATS
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float64])
def test_block_round_trip_errors_equal_those_in_float64(dtype: str, stored: torch.dtype) -> None:
    tensor = normal(130, 201).to(stored)
    tensor[0, :4] = torch.tensor([math.inf, math.nan, -math.inf, 0.0])
    found = round_trip("w", tensor, dtype)
    codes, scale = cast_or_quantize(tensor, dtype)
    assert scale is not None
    after = by_element(codes, scale, dtype).double()
    before, finite = tensor.double(), torch.isfinite(tensor)
    delta = (after - before)[finite]
    energy = before[finite].square().sum()
    assert found.max_abs == pytest.approx(float(delta.abs().max()), rel=1e-6)
    assert found.rel_l2 == pytest.approx(math.sqrt(float(delta.square().sum() / energy)), rel=1e-4)
    assert (found.nonfinite, found.saturated, found.overflowed) == (3, 2, 0)
    zero = codes.float() == 0
    assert found.underflowed == int((finite & (before != 0) & zero).sum())
    row = dtypes.BY_NAME[dtype]
    if row.kind == "float":
        assert found.subnormal == int((~zero & (codes.float().abs() < row.tiny)).sum())


@FORMATS
def test_only_values_that_a_block_format_rounds_to_zero_are_counted_as_lost(dtype: str) -> None:
    tensor = normal(256, 256, size=1.0)
    assert count_losses("w", tensor, dtype) is None
    tensor[:, ::2] *= 1e-20
    tensor[7] *= 1e-20
    loss = count_losses("w", tensor, dtype)
    codes, _ = cast_or_quantize(tensor, dtype)
    assert loss is not None
    assert loss.vanished == int(((tensor != 0) & (codes.float() == 0)).sum())
    assert loss == count_losses("w", tensor, dtype, codes)


@FORMATS
def test_casting_an_empty_tensor_to_a_block_format_loses_nothing(dtype: str) -> None:
    assert count_losses("w", torch.zeros(4, 0), dtype) is None


def test_block_round_trip_uses_bounded_memory() -> None:
    tensor = torch.zeros(1, 4096).expand(20_000, 4096)
    round_trip("w", tensor[:300], "nvfp4")
    assert peak_anonymous(lambda: round_trip("w", tensor, "nvfp4")) < 64 * 2**20
