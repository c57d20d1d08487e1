"""The machine code beside numpy in extended precision."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from dtype_engine.runtime.formats.row_blocks import single_intraop_thread
from dtype_engine.runtime.numerics import row_function
from dtype_engine.runtime.numerics.compare.metrics import OutputComparison
from dtype_engine.runtime.numerics.row_kernel import FARTHEST, RowKernel, RowSums

Long = np.longdouble
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

pytestmark = pytest.mark.skipif(not RowKernel.is_available(), reason="no code can be made on this machine")


def sums_of(reference: torch.Tensor, candidate: torch.Tensor, distribution: bool = True) -> tuple[RowSums, np.ndarray]:
    """The kernel's sums, with the δ of the likeliest class as shift, and that."""
    top = reference.float().argmax(-1, keepdim=True)
    largest = reference.gather(1, top)[:, 0].float()
    shift = candidate.gather(1, top)[:, 0].float() - largest
    kernel = RowKernel.of(reference.dtype, candidate.dtype, distribution)
    return kernel.sums(reference, candidate, largest, shift), shift.double().numpy()


def check(found: RowSums, shift: np.ndarray, reference: torch.Tensor, candidate: torch.Tensor) -> None:
    """Compare with the definitions."""
    r, c = (each.double().numpy().astype(Long) for each in (reference, candidate))
    delta, p = c - r, np.exp(r - r.max(-1, keepdims=True))
    x = delta - shift[:, None]
    assert found.absolute == pytest.approx(np.abs(delta).sum(-1).astype(float), rel=3e-7)
    assert found.noise == pytest.approx((delta**2).sum(-1).astype(float), rel=3e-7)
    assert found.largest == pytest.approx(np.abs(delta).max(-1).astype(float), rel=2**-23)
    assert np.abs(found.moved - (r * delta).sum(-1)).max() <= 3e-7 * np.abs(r * delta).sum(-1).max()
    assert np.abs(found.first - (p * x).sum(-1)).max() <= 1e-6 * np.abs(p * x).sum(-1).max()
    assert found.rest == pytest.approx((p * (np.expm1(x) - x)).sum(-1).astype(float), rel=2e-6)
    assert found.top.tolist() == c.argmax(-1).tolist()


@pytest.mark.parametrize("of_candidate", DTYPES)
@pytest.mark.parametrize("of_reference", DTYPES)
@pytest.mark.parametrize("width", [1, 15, 16, 17, 2048, 2063, 4999])
def test_sums_are_those_of_the_definitions(width: int, of_reference: torch.dtype, of_candidate: torch.dtype) -> None:
    """Of widths with and without a rest, and more and less than are summed in float32, all logits below zero in some rows."""
    generator = torch.Generator().manual_seed(width)
    offset = torch.linspace(-30, 10, 37)[:, None]
    reference = (3 * torch.randn(37, width, generator=generator) + offset).to(of_reference)
    candidate = (reference.float() + 0.3 * torch.randn(37, width, generator=generator)).to(of_candidate)
    check(*sums_of(reference, candidate), reference, candidate)


@pytest.mark.parametrize("drift", [1e-6, 1e-3, 0.9, 1.1, 3.0])
def test_however_far_the_outputs_are(drift: float) -> None:
    """Below and above the |x| up to which the series is taken."""
    generator = torch.Generator().manual_seed(3)
    reference = 2 * torch.randn(20, 5003, generator=generator)
    candidate = reference + drift * torch.randn(20, 5003, generator=generator)
    found, shift = sums_of(reference, candidate)
    assert float((candidate - reference).abs().max() + abs(shift).max()) < FARTHEST
    check(found, shift, reference, candidate)


def test_rows_that_lie_apart_in_memory_or_are_turned() -> None:
    generator = torch.Generator().manual_seed(4)
    wide = torch.randn(31, 5000, generator=generator)
    candidate = (wide + 0.01 * torch.randn(31, 5000, generator=generator)).bfloat16()
    for reference, other in (
        (wide[::3, 7:4100], candidate[::3, 7:4100]),
        (wide.T.contiguous().T, candidate),
        (wide[:1].expand(31, -1), candidate),
    ):
        check(*sums_of(reference, other), reference, other)


def test_of_equal_largest_logits_the_first_is_taken() -> None:
    reference, candidate = torch.zeros(6, 4100), torch.full((6, 4100), -3.0)
    for row, columns in enumerate(((5, 4099), (4098, 4099), (0, 16), (17, 33), (2000, 2100), (15, 16))):
        candidate[row, list(columns)] = -1.0
    found, _ = sums_of(reference, candidate)
    assert found.top.tolist() == [5, 4098, 0, 17, 2000, 15]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("column", [0, 4098])
@pytest.mark.parametrize("side", ["reference", "candidate"])
def test_a_row_with_a_value_that_is_not_finite_is_told_by_its_noise(side: str, column: int, bad: float) -> None:
    reference = torch.randn(8, 4099)
    candidate = reference + 0.01
    (reference if side == "reference" else candidate)[3, column] = bad
    found, _ = sums_of(reference, candidate)
    assert np.isfinite(found.noise).tolist() == [row != 3 for row in range(8)]


def test_outputs_that_are_no_distribution() -> None:
    reference = torch.randn(9, 4099)
    candidate = 2 * reference
    found, _ = sums_of(reference, candidate, distribution=False)
    assert found.moved == pytest.approx((reference.double() ** 2).sum(-1).numpy(), rel=3e-7)


def test_as_many_threads_give_the_same_as_one() -> None:
    reference = torch.randn(203, 5000)
    candidate = (reference + 0.01 * torch.randn(203, 5000)).half()
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 4):
            torch.set_num_threads(threads)
            found.append(sums_of(reference, candidate)[0])
    finally:
        torch.set_num_threads(before)
    assert all((getattr(found[0], name) == getattr(found[1], name)).all() for name in ("noise", "first", "rest", "top"))


@pytest.mark.parametrize("rows", [1, 5, 301])
def test_whoever_goes_over_the_rows_sums_are_the_same(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = torch.randn(rows, 5000, generator=torch.Generator().manual_seed(rows))
    candidate = (reference * 1.01).bfloat16()
    kernel, zeros = RowKernel.of(torch.float32, torch.bfloat16, True), torch.zeros(rows)

    def sums() -> list[list[float]]:
        found = kernel.sums(reference, candidate, reference.amax(-1), zeros)
        return [getattr(found, field.name).tolist() for field in dataclasses.fields(found)]

    def by_one_thread() -> list[list[float]]:
        with single_intraop_thread():
            return sums()

    by_torchs_threads = sums()
    monkeypatch.setattr(row_function, "_team_of_torch", lambda: None)
    assert sums() == by_one_thread() == by_torchs_threads


def test_where_no_code_can_be_made_figures_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = torch.randn(40, 5000)
    candidate = (reference + 0.01 * torch.randn(40, 5000)).bfloat16()

    def figures() -> tuple[float, float]:
        comparison = OutputComparison(True)
        comparison.add(reference, candidate)
        found = comparison.result()
        return found.kl_mean, found.rel_l2

    with_code = figures()
    monkeypatch.setattr(row_function, "_target", lambda: None)
    assert figures() == pytest.approx(with_code, rel=1e-6)
    assert figures() != with_code


def test_without_llvmlite_there_is_none() -> None:
    """As on a machine that it has no wheel for."""
    program = (
        "import sys; sys.modules['llvmlite'] = None\n"
        "from dtype_engine.runtime.numerics.row_kernel import RowKernel\n"
        "print(RowKernel.is_available())"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "False\n"
