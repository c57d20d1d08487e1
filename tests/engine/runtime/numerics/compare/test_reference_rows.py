"""Figures of a reference's rows, in float64 and by machine code, beside numpy in extended precision."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dtype_engine.runtime.numerics.compare.reference_rows import ReferenceRows
from dtype_engine.runtime.numerics.row_function import is_available

Long = np.longdouble


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("offset", "certain"), [(0.0, 0.0), (-90.0, 15.0), (40.0, 3.0)])
@pytest.mark.parametrize("width", [37, 4096, 5003, 32000])
def test_figures_are_those_of_the_definitions(dtype: torch.dtype, offset: float, certain: float, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    output = offset + 3 * torch.randn(23, width, generator=generator)
    output[:, width // 3] += certain
    output = output.to(dtype)
    found, r = ReferenceRows(output, True), output.double().numpy().astype(Long)
    digits = 1e-12 if found.in_float64 else 3e-7
    assert found.in_float64 == (width < 4096 or not is_available(dtype))
    assert found.finite.all()
    assert found.energy == pytest.approx((r**2).sum(-1).astype(float), rel=digits)
    assert found.top.tolist() == r.argmax(-1).tolist()
    assert found.largest.tolist() == r.max(-1).astype(float).tolist()
    expected = r.max(-1) + np.log(np.exp(r - r.max(-1, keepdims=True)).sum(-1))
    assert found.log_total == pytest.approx(expected.astype(float), rel=1e-14, abs=digits)
    labels = torch.arange(23)
    assert found.log_p(labels, output) == pytest.approx(
        (r[np.arange(23), labels.numpy()] - expected).astype(float), rel=1e-14, abs=digits
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("column", [3, 5002])
@pytest.mark.filterwarnings("error")
def test_a_row_that_is_not_finite_is_known(bad: float, column: int) -> None:
    output = torch.randn(9, 5003)
    output[4, column] = bad
    found = ReferenceRows(output, True)
    assert found.finite.tolist() == [row != 4 for row in range(9)] or found.in_float64
    alone = ReferenceRows(output[5:], True)
    assert found.log_total[5:].tolist() == alone.log_total.tolist() or found.in_float64


def test_no_distribution_is_summed_alone() -> None:
    output = torch.randn(9, 5003)
    found = ReferenceRows(output, False)
    assert found.energy == pytest.approx((output.double() ** 2).sum(-1).numpy(), rel=3e-7)
    assert not found.log_total.any()
