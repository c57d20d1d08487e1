"""Roundings of recurrent states, against numpy's casts and its next numbers of float16."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from dtype_engine.core.kv_formats import STATE_FORMATS
from dtype_engine.runtime.numerics.state_rounding import round_state

VALUES = np.concatenate(
    [np.random.default_rng(0).normal(size=2000).astype(np.float32) * scale for scale in (1e-9, 1e-6, 1e-3, 1, 300)]
    + [np.array([0, -0.0, 1, 2**-24, 2**-25, -(2**-14), 65504, 65519, -65530, np.inf, -np.inf, np.nan], np.float32)]
)


def _uniform(seed: int) -> torch.Tensor:
    return torch.rand(VALUES.shape, generator=torch.Generator().manual_seed(seed))


def _rounded(form: str, seed: int = 0) -> np.ndarray:
    return round_state(torch.from_numpy(VALUES), form, lambda shape: _uniform(seed).view(shape)).numpy()


@pytest.mark.parametrize(("form", "dtype"), [("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16)])
def test_state_in_16_bits_has_the_values_of_numpy(form: str, dtype: type) -> None:
    with np.errstate(over="ignore"):
        expected = VALUES.astype(dtype).astype(np.float32)
    assert np.array_equal(_rounded(form), expected, equal_nan=True)


def test_every_format_of_states_keeps_infinite_values_and_nan() -> None:
    for form in STATE_FORMATS["ssm_state"]:
        assert np.array_equal(_rounded(form)[-3:], VALUES[-3:], equal_nan=True)


def test_stochastic_rounding_gives_one_of_both_neighbours_in_float16() -> None:
    low, high = _neighbours()
    found = _rounded("float16@stochastic")
    finite = np.isfinite(VALUES)
    assert np.all((found == low)[finite] | (found == high)[finite])
    same = low == high
    assert same.sum() > 3
    assert np.array_equal(found[same & finite], VALUES[same & finite])
    assert (found == low)[~same].sum() > 3000 < (found == high)[~same].sum()


def _neighbours() -> tuple[np.ndarray, np.ndarray]:
    """The largest number of float16 that is not above each value, and the smallest that is not below, in float32."""
    with np.errstate(over="ignore"):
        near = VALUES.astype(np.float16)
        below = np.where(near.astype(np.float32) > VALUES, np.nextafter(near, np.float16(-np.inf)), near)
        above = np.where(near.astype(np.float32) < VALUES, np.nextafter(near, np.float16(np.inf)), near)
    return below.astype(np.float32), above.astype(np.float32)


def test_mean_of_many_stochastic_roundings_is_the_value_itself() -> None:
    low, high = _neighbours()
    kept = np.isfinite(low) & np.isfinite(high) & (low < high)
    draws = 400
    mean = np.mean([_rounded("float16@stochastic", seed)[kept].astype(np.float64) for seed in range(draws)], 0)
    error = (mean - VALUES[kept]) / (high[kept] - low[kept]).astype(np.float64)
    # The rounding of one value has a standard deviation of at most 1/2 of the distance between its neighbours.
    assert np.abs(error).max() < 5 * 0.5 / np.sqrt(draws)
    assert abs(error.mean()) < 5 * 0.5 / np.sqrt(draws * error.size)


def test_a_double_is_rounded_in_its_own_dtype() -> None:
    values = torch.tensor([1 + 2**-12, 0.1, -3.0], dtype=torch.float64)
    found = round_state(values, "float16@stochastic", lambda shape: torch.full(shape, 0.2))
    assert found.dtype == torch.float64
    assert found.tolist() == [1 + 2**-10, 0.10003662109375, -3.0]
