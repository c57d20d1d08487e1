"""Roundings: the values of the format with the smaller error of a layer's output, as a second implementation finds them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dtype_engine.core import dtypes
from dtype_engine.core.roundings import FEWEST_TOKENS, ROUNDED_FORMATS
from dtype_engine.runtime.formats.dequantize import dequantize
from dtype_engine.runtime.numerics import roundings
from dtype_engine.runtime.numerics.quantize import cast_or_quantize, values_in
from dtype_engine.runtime.numerics.roundings import (
    InputStatistics,
    WeightStatistics,
    output_error,
    round_matrix,
    rounded_codes,
)

NAMES = [name for name, row in dtypes.BY_NAME.items() if row.rounding and row.llama is None]
CHANNELS = 160


def layer(seed: int = 0, rows: int = 24, tokens: int = 900) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (a weight [rows, CHANNELS], inputs [tokens, CHANNELS] whose channels differ in size and depend on each other)."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, CHANNELS, generator=generator)
    mixing = torch.randn(CHANNELS, 12, generator=generator) @ torch.randn(12, CHANNELS, generator=generator)
    inputs = torch.randn(tokens, CHANNELS, generator=generator) @ (torch.eye(CHANNELS) + 0.3 * mixing)
    return weight, inputs * torch.rand(CHANNELS, generator=generator) * 3


def known(inputs: torch.Tensor) -> InputStatistics:
    products = inputs.T @ inputs / len(inputs)
    return InputStatistics(products.diagonal().clone(), products, len(inputs))


def output_difference(inputs: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> float:
    """The mean squared difference of the layer's output, summed over its outputs."""
    return float((inputs.double() @ (after - before).double().T).square().sum() / len(inputs))


def test_every_format_with_every_rounding_is_a_dtype() -> None:
    assert {dtypes.unrounded(name) for name in NAMES} == set(ROUNDED_FORMATS)
    assert len(NAMES) == 2 * len(ROUNDED_FORMATS)


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_a_large_matrix_are_rounded_some_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, inputs = layer()
    given = WeightStatistics(1, {None: known(inputs)})
    whole, asked = rounded_codes(weight, name, given), list[int]()
    rounding = dtypes.BY_NAME[name].rounding
    rounder = roundings.ROUNDERS[rounding]

    def noted(values: torch.Tensor, form: roundings.Format, given: InputStatistics, across: int) -> roundings.Rounded:
        asked.append(len(values))
        return rounder(values, form, given, across)

    monkeypatch.setattr(roundings, "_VALUES_AT_ONCE", 10 * CHANNELS)
    monkeypatch.setitem(roundings.ROUNDERS, rounding, noted)
    parts = rounded_codes(weight, name, given)
    assert asked == [10, 10, 4]
    assert torch.equal(parts.scales.stored.view(torch.uint8), whole.scales.stored.view(torch.uint8))
    # A matrix product may add the same numbers in another order for another number of rows.
    assert (parts.codes.float() != whole.codes.float()).float().mean() < 0.01


@pytest.mark.parametrize("name", NAMES)
def test_codes_are_of_the_format_and_lower_the_error(name: str) -> None:
    weight, inputs = layer()
    plain = dtypes.unrounded(name)
    made = rounded_codes(weight, name, WeightStatistics(1, {None: known(inputs)}))
    values = dequantize(made.codes, made.scale, torch.float32, dtypes.BY_NAME[name].blocks)
    again, scale = cast_or_quantize(values, plain, float(weight.abs().max()), made.scales)
    assert scale is not None
    assert torch.equal(again.float(), made.codes.float())
    assert torch.equal(scale.reshape(-1), made.scale.reshape(-1))
    assert made.codes.shape == weight.shape
    nearest, chosen = (
        output_difference(inputs, weight, each) for each in (values_in(weight, plain, torch.float32), values)
    )
    of_squares = (values - weight).square() @ known(inputs).squares
    least = (values_in(weight, plain, torch.float32) - weight).square() @ known(inputs).squares
    if name.endswith(":gptq"):
        assert chosen < 0.75 * nearest
    else:
        assert float(of_squares.sum()) <= float(least.sum()) * 1.00001


@pytest.mark.parametrize("name", NAMES)
def test_no_output_has_a_larger_error_after_few_tokens(name: str) -> None:
    weight, inputs = layer(3, tokens=20)
    given = known(inputs)
    if name.endswith(":imatrix"):
        given = dataclasses.replace(given, products=torch.diag(given.squares))
    assert given.products is not None
    made = rounded_codes(weight, name, WeightStatistics(1, {None: given}))
    values = dequantize(made.codes, made.scale, torch.float32, dtypes.BY_NAME[name].blocks)
    chosen = output_error(values - weight, given.products)
    nearest = output_error(values_in(weight, dtypes.unrounded(name), torch.float32) - weight, given.products)
    assert bool((chosen <= nearest * 1.001 + 1e-9).all())


def test_gptq_is_that_of_the_paper() -> None:
    weight, inputs = layer(1)
    given = known(inputs)
    assert given.products is not None
    made = round_matrix(weight, "int4@g32:gptq", given, 1)
    plain = plainly_compensated(weight, given.products, made.scales.effective)
    rows = output_error(plain - weight, given.products) < output_error(
        values_in(weight, "int4@g32", torch.float32) - weight, given.products
    )
    same = (made.values == plain)[rows].float().mean()
    assert same > 0.98  # a sum in another order may turn a tie


def plainly_compensated(weight: torch.Tensor, products: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Round the channels of a weight to int4 one after the other, each time with the inverse of what is left of H (Frantar et al.,
    equation 2), in float64 and without a Cholesky factor.
    """
    left, result = weight.double().clone(), torch.empty_like(weight)
    order = torch.argsort(products.diagonal(), descending=True, stable=True)
    damped = products.double() + 0.01 * products.double().diagonal().mean() * torch.eye(CHANNELS, dtype=torch.float64)
    rest = order.tolist()
    for channel in order.tolist():
        inverse = torch.linalg.inv(damped[rest][:, rest])
        scale = scales[:, channel // 32].double()
        rounded = (left[:, channel] / scale).clamp(-8, 7).round() * scale
        left[:, rest] -= torch.outer((left[:, channel] - rounded) / inverse[0, 0], inverse[0])
        result[:, channel] = rounded.float()
        rest = rest[1:]
    return result


@pytest.mark.parametrize("name", NAMES)
def test_weights_stored_the_other_way_round_are_rounded_along_their_rows(name: str) -> None:
    weight, inputs = layer(2)
    turned = weight.T.contiguous()
    made = rounded_codes(turned, name, WeightStatistics(0, {None: known(inputs)}))
    values = dequantize(made.codes, made.scale, torch.float32, dtypes.BY_NAME[name].blocks)
    nearest = values_in(turned, dtypes.unrounded(name), torch.float32)
    if name.endswith(":gptq"):
        assert output_difference(inputs, weight, values.T) < output_difference(inputs, weight, nearest.T)
    else:
        squares = known(inputs).squares[:, None]
        assert float(((values - turned).square() * squares).sum()) <= float(
            ((nearest - turned).square() * squares).sum()
        )


@pytest.mark.parametrize("name", ["int4@g32:gptq", "float8_e4m3fn:gptq", "nvfp4:imatrix"])
def test_experts_are_rounded_one_by_one_and_those_with_few_tokens_are_not(name: str) -> None:
    weights, inputs = zip(*(layer(seed) for seed in range(3)), strict=True)
    stacked = torch.stack(weights)
    few = dataclasses.replace(known(inputs[1]), tokens=FEWEST_TOKENS - 1)
    made = rounded_codes(stacked, name, WeightStatistics(1, {0: known(inputs[0]), 1: few}))
    values = dequantize(made.codes, made.scale, torch.float32, dtypes.BY_NAME[name].blocks)
    nearest = values_in(stacked, dtypes.unrounded(name), torch.float32)
    assert made.nearest == (1, 2)
    assert torch.equal(values[1:], nearest[1:])
    assert not torch.equal(values[0], nearest[0])
    if name.endswith("gptq"):
        assert output_difference(inputs[0], weights[0], values[0]) < output_difference(
            inputs[0], weights[0], nearest[0]
        )


def test_weights_that_are_not_finite_get_the_nearest_values() -> None:
    weight, inputs = layer()
    weight[3, 5] = torch.inf
    made = rounded_codes(weight, "int4@g32:gptq", WeightStatistics(1, {None: known(inputs)}))
    codes, scale = cast_or_quantize(weight, "int4@g32")
    assert scale is not None
    assert torch.equal(made.codes, codes)
    assert torch.equal(made.scale, scale)


def test_channels_that_are_always_zero_cost_nothing() -> None:
    weight, inputs = layer()
    inputs[:, 40:50] = 0
    made = round_matrix(weight, "int4@g32:gptq", known(inputs), 1)
    assert bool(torch.isfinite(made.values).all())
    nearest = values_in(weight, "int4@g32", torch.float32)
    assert output_difference(inputs, weight, made.values) < output_difference(inputs, weight, nearest)
