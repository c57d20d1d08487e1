"""Sums over elements against numpy in extended precision."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from dtype_engine.runtime.numerics.compare.element_sums import ElementSums, element_sums

Long = np.longdouble
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check(reference: torch.Tensor, candidate: torch.Tensor) -> None:
    """Compare with the definitions."""
    found = element_sums(reference, candidate)
    r, c = (each.double().numpy().astype(Long).reshape(-1) for each in (reference, candidate))
    delta = c - r
    assert (found.elements, found.nonfinite, found.nonfinite_reference) == (r.size, 0, 0)
    assert found.max_abs == pytest.approx(float(np.abs(delta).max(initial=0)), rel=1e-15)
    expected = {
        "sum_abs": np.abs(delta), "noise": delta**2, "energy": r**2, "energy_candidate": c**2, "product": r * c
    }  # fmt: skip
    for name, terms in expected.items():
        assert abs(getattr(found, name) - terms.sum()) <= 1e-12 * np.abs(terms).sum(), name


@pytest.mark.parametrize("of_candidate", DTYPES)
@pytest.mark.parametrize("of_reference", DTYPES)
@pytest.mark.parametrize("shape", [(0, 5), (), (1,), (3, 7, 11), (70, 1031)])
def test_element_sums_equal_their_definitions(
    shape: tuple[int, ...], of_reference: torch.dtype, of_candidate: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)
    reference = (3 * torch.randn(shape, generator=generator)).to(of_reference)
    candidate = (reference.float() + 0.01 * torch.randn(shape, generator=generator)).to(of_candidate)
    check(reference, candidate)


@pytest.mark.parametrize("factor", [1 + 1e-7, 1e-14, 1.0, -1.0, 0.0, 1e20])
def test_element_sums_are_right_for_outputs_of_very_different_scale(factor: float) -> None:
    reference = torch.randn(50, 1000, generator=torch.Generator().manual_seed(2)) * 1e-3
    check(reference, reference * factor)
    check(reference * 1e-20, reference * 1e-20 * factor)


def test_element_sums_accept_noncontiguous_outputs_and_outputs_with_gradients() -> None:
    wide = torch.randn(90, 1100, generator=torch.Generator().manual_seed(3))
    candidate = wide.bfloat16()
    check(wide[::3, 7:500], candidate[::3, 7:500])
    check(wide.T, candidate.T)
    check(wide[:1].expand(90, -1), candidate)
    assert element_sums(wide.clone().requires_grad_(), candidate) == element_sums(wide, candidate)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 40_000])
def test_element_sums_count_nonfinite_values_on_one_or_both_sides(bad: float, place: int) -> None:
    reference = torch.randn(70_000, generator=torch.Generator().manual_seed(4))
    candidate = reference + 0.01 * torch.randn(70_000, generator=torch.Generator().manual_seed(5))
    spoiled_r, spoiled_c = reference.clone(), candidate.clone()
    spoiled_r[place] = spoiled_c[place] = bad
    others = torch.arange(70_000) != place
    expected = element_sums(reference[others], candidate[others])
    in_both, in_candidate, in_reference = (
        element_sums(*pair) for pair in ((spoiled_r, spoiled_c), (reference, spoiled_c), (spoiled_r, candidate))
    )
    masked = bad == -math.inf
    assert (in_both.nonfinite, in_both.nonfinite_reference) == (0, not masked)
    assert (in_candidate.nonfinite, in_candidate.nonfinite_reference) == (1, 0)
    assert (in_reference.nonfinite, in_reference.nonfinite_reference) == (0, not masked)
    for found in (in_candidate, in_reference):
        assert found.sum_abs == found.max_abs == found.noise == math.inf
    for found in (in_both, in_candidate, in_reference):
        assert found.elements == 70_000
        for name in ("energy", "energy_candidate", "product"):
            assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-12)
    for name in ("sum_abs", "max_abs", "noise"):
        assert getattr(in_both, name) == pytest.approx(getattr(expected, name), rel=1e-12)


def test_element_sums_do_not_depend_on_the_number_of_threads() -> None:
    reference = torch.randn(300, 2000, generator=torch.Generator().manual_seed(6))
    candidate = reference.half()
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(element_sums(reference, candidate))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1]


def test_element_sums_of_parts_add_up_to_those_of_the_whole() -> None:
    reference, candidate = torch.randn(9, 5), torch.randn(9, 5)
    total, whole = ElementSums(), element_sums(reference, candidate)
    for part in (slice(0, 4), slice(4, 9)):
        total.add(element_sums(reference[part], candidate[part]))
    assert dataclasses.astuple(total) == pytest.approx(dataclasses.astuple(whole), rel=1e-12)


def test_element_sums_of_different_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in shape"):
        element_sums(torch.zeros(2, 3), torch.zeros(3, 2))
