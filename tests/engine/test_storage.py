from __future__ import annotations

import math

import pytest
import torch

from dtype_engine import dtypes
from dtype_engine.storage import bring_back, convert, lost_values

STORAGE = pytest.mark.parametrize("dtype", dtypes.STORAGE_ONLY)


@STORAGE
@pytest.mark.parametrize("shape", [(6, 5), (4, 3, 2), (9,), ()])
def test_scales_are_amax_over_the_largest_value(dtype: str, shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    kept, scale = convert(weight, dtype)
    assert scale is not None
    assert kept.shape == weight.shape
    rows = weight.reshape(shape[0], -1) if len(shape) > 1 else weight.reshape(1, -1)
    for row, found in zip(rows, scale, strict=True):
        assert found.item() == pytest.approx(row.abs().max().item() / dtypes.BY_NAME[dtype].max, rel=1e-6)


@STORAGE
def test_values_come_back_within_half_a_step(dtype: str) -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    kept, scale = convert(weight, dtype)
    assert scale is not None
    error = (bring_back(kept, scale, torch.float32) - weight).abs()
    row = dtypes.BY_NAME[dtype]
    step = (
        scale[:, None]
        if dtype == "int8"
        else torch.maximum(weight.abs() * 2.0**-row.mantissa, scale[:, None] * row.tiny)
    )
    assert bool((error <= 0.5001 * step).all())


@STORAGE
def test_zeros_and_infinities(dtype: str) -> None:
    weight = torch.tensor([[0.0, 0.0], [1.0, math.inf], [2.0, -math.inf]])
    kept, scale = convert(weight, dtype)
    assert scale is not None
    back = bring_back(kept, scale, torch.float32)
    assert back[0].tolist() == [0, 0]
    assert back[1].tolist() == pytest.approx([1, 1])
    assert back[2].tolist() == pytest.approx([2, -2])
    lost = lost_values("w", weight, kept, dtype)
    assert lost is not None
    assert (lost.saturated, lost.nonfinite) == (2, 2)


def test_lost_values_against_counting_one_by_one() -> None:
    weight = torch.tensor([1.0, 70000.0, -1e9, 1e-9, 0.0, math.nan, math.inf, 65504.0, 6e-8])
    half = weight.half()
    lost = lost_values("w", weight, half, "float16")
    pairs = list(zip(weight.tolist(), half.tolist(), strict=True))
    assert lost is not None
    assert lost.overflowed == sum(math.isfinite(a) and not math.isfinite(b) for a, b in pairs)
    assert lost.underflowed == sum(a != 0 and b == 0 for a, b in pairs)
    assert lost.nonfinite == sum(not math.isfinite(a) for a, _ in pairs)
    assert lost_values("w", torch.ones(3), torch.ones(3).half(), "float16") is None


def test_a_cast_to_integers_would_wrap_so_int8_is_always_scaled() -> None:
    weight = torch.tensor([[0.3, -0.4], [300.0, 100.0]])
    assert weight.to(torch.int8).tolist()[0] == [0, 0]
    kept, scale = convert(weight, "int8")
    assert scale is not None
    assert kept.tolist() == [[95, -127], [127, 42]]
