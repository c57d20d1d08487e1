"""Outputs compared in float32 beside the definitions in extended precision."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dtype_engine.results.drift import OutputDrift
from dtype_engine.runtime.numerics.compare.metrics import OutputComparison
from dtype_engine.runtime.numerics.compare.rows_in_float64 import RowsInFloat64
from dtype_engine.runtime.numerics.rows_in_float32 import RowsInFloat32

Long = np.longdouble


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> list[slice]:
    """The rows that were compared in float64."""
    rows: list[slice] = []
    compare = RowsInFloat64.compare

    def noted(self: RowsInFloat64, of: slice) -> object:
        rows.append(of)
        return compare(self, of)

    monkeypatch.setattr(RowsInFloat64, "compare", noted)
    return rows


def definitions(reference: torch.Tensor, candidate: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """The figures from their definitions, in extended precision."""
    r, c = (logits.double().numpy().astype(Long) for logits in (reference, candidate))
    delta = c - r
    log_p, log_q = (
        logits - logits.max(-1, keepdims=True)
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True)) for logits in (r, c)
    )  # fmt: skip
    kl = (np.exp(log_p) * (log_p - log_q)).sum(-1)
    each = np.arange(len(r)), labels.numpy()
    return {
        "mean_abs": float(np.abs(delta).mean()),
        "max_abs": float(np.abs(delta).max()),
        "rel_l2": float(np.sqrt((delta**2).sum() / (r**2).sum())),
        "cosine": float((r * c).sum() / np.sqrt((r**2).sum() * (c**2).sum())),
        "kl_mean": float(kl.mean()),
        "kl_min": float(kl.min()),
        "kl_max": float(kl.max()),
        "kl_median": float(np.median(kl)),
        "top1_agreement": float((r.argmax(-1) == c.argmax(-1)).mean()),
        "dp_max": float((np.exp(log_q) - np.exp(log_p))[each].max()),
        "log_ratio": float((log_p - log_q)[each].mean()),
        "perplexity_candidate": float(np.exp(-log_q[each].mean())),
    }


def figures(reference: torch.Tensor, candidate: torch.Tensor, labels: torch.Tensor) -> OutputDrift:
    comparison = OutputComparison(True)
    comparison.add(reference[None], candidate[None], labels[None])
    return comparison.result()


def logits(
    rows: int, classes: int, spread: float, certain: float, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Generator]:
    """Some logits, of which one of each row stands out, and labels that often are that one."""
    generator = torch.Generator().manual_seed(rows + classes)
    reference = offset + spread * torch.randn(rows, classes, generator=generator)
    top = torch.randint(0, classes, (rows,), generator=generator)
    reference[torch.arange(rows), top] += certain
    labels = torch.where(torch.arange(rows) % 3 > 0, top, torch.randint(0, classes, (rows,), generator=generator))
    return reference, labels, generator


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("spread", "certain", "offset", "drift"),
    [
        (0.6, 0.0, 0.0, 4e-3),
        (3.0, 12.0, 0.0, 0.05),
        (3.0, 4.0, -200.0, 0.02),
        (3.0, 2.0, 60.0, 0.1),
        (2.0, 8.0, 0.0, 1e-4),
        (2.0, 5.0, 0.0, 2.0),
        (3.0, 20.0, 0.0, 4.0),
    ],
)
@pytest.mark.parametrize(("rows", "classes"), [(40, 4099), (9, 32000), (5, 50257)])
def test_the_figures_are_those_of_the_definitions(
    dtype: torch.dtype, spread: float, certain: float, offset: float, drift: float, rows: int, classes: int,
    in_float64: list[slice],
) -> None:  # fmt: skip
    """Flat and certain distributions, those whose exponentials are out of float32's range, and what rounding alone moves."""
    reference, labels, generator = logits(rows, classes, spread, certain, offset)
    candidate = (reference + drift * torch.randn(rows, classes, generator=generator)).to(dtype)
    found, expected = figures(reference, candidate, labels), definitions(reference, candidate, labels)
    if abs(offset) < 100 or dtype == torch.float32:  # bfloat16 is too coarse there
        assert not in_float64
    assert found.top1_agreement == expected["top1_agreement"]
    assert found.max_abs == pytest.approx(expected["max_abs"], rel=2**-23)
    for name in ("mean_abs", "rel_l2", "kl_mean", "kl_min", "kl_max", "kl_median", "perplexity_candidate"):
        assert getattr(found, name) == pytest.approx(expected[name], rel=1e-6), name
    for name in ("log_ratio", "dp_max"):
        assert getattr(found, name) == pytest.approx(expected[name], rel=2e-6, abs=2e-8), name
    assert 1 - found.cosine == pytest.approx(1 - expected["cosine"], rel=1e-6, abs=1e-12)


def test_a_reference_of_16_bits_beside_a_candidate_of_32(in_float64: list[slice]) -> None:
    reference, labels, generator = logits(30, 5000, 2.0, 6.0)
    candidate = reference + 0.01 * torch.randn(30, 5000, generator=generator)
    for dtype in (torch.bfloat16, torch.float16):
        found, expected = (
            figures(reference.to(dtype), candidate, labels),
            definitions(reference.to(dtype), candidate, labels),
        )
        assert found.kl_mean == pytest.approx(expected["kl_mean"], rel=1e-6)
        assert found.rel_l2 == pytest.approx(expected["rel_l2"], rel=1e-6)
    assert not in_float64


@pytest.mark.parametrize("change", ["far", "one far", "other size", "tiny", "double", "narrow", "shifted"])
def test_what_float32_can_not_tell_is_compared_in_float64(change: str, in_float64: list[slice]) -> None:
    """So far apart that e^x is out of range, of another size, with δ² below float32's range, and where nearly all of KL cancels."""
    reference, labels, generator = logits(150, 4099, 2.0, 5.0)
    candidate = reference + 0.01 * torch.randn(150, 4099, generator=generator)
    if change == "far":
        candidate = reference + 20.0 * torch.randn(150, 4099, generator=generator)
    elif change == "one far":
        candidate[5, 11] += 39.0
    elif change == "other size":
        candidate = reference * 0.01
    elif change == "tiny":
        reference = reference * 1e-14
        candidate = reference * (1 + 1e-3)
    elif change == "double":
        candidate = candidate.double()
    elif change == "narrow":
        reference, candidate, labels = reference[:, :100].contiguous(), candidate[:, :100].contiguous(), labels % 100
    else:  # all but the likeliest class, which has little of p
        reference = 0.1 * torch.randn(150, 4099, generator=generator)
        candidate = reference + 0.25
        rows = torch.arange(150)
        candidate[rows, reference.argmax(-1)] = reference[rows, reference.argmax(-1)]
    found, expected = figures(reference, candidate, labels), definitions(reference, candidate, labels)
    assert in_float64
    for name in ("mean_abs", "rel_l2", "kl_mean"):
        assert getattr(found, name) == pytest.approx(expected[name], rel=1e-9, abs=1e-15), name
    # That of the reference is in float32 whatever the candidate is.
    assert found.perplexity_candidate == pytest.approx(expected["perplexity_candidate"], rel=1e-7)
    assert found.top1_agreement == expected["top1_agreement"]
    if change == "one far":
        assert sum(rows.stop - rows.start for rows in in_float64) < 150


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["reference", "candidate"])
@pytest.mark.filterwarnings("error")
def test_rows_with_a_value_that_is_not_finite_do_not_spoil_others(side: str, bad: float) -> None:
    reference, labels, generator = logits(200, 4099, 2.0, 5.0)
    candidate = reference + 0.01 * torch.randn(200, 4099, generator=generator)
    (reference if side == "reference" else candidate)[150, 3] = bad
    comparison = OutputComparison(True)
    comparison.add(reference, candidate, labels)
    kl = comparison.sequences[0].positions
    assert kl is not None
    others = torch.arange(200) != 150
    expected = figures(reference[others], candidate[others], labels[others])
    assert float(kl.kl[others].mean()) == pytest.approx(expected.kl_mean, rel=1e-6)
    assert comparison.result().nonfinite == (side == "candidate")


@pytest.mark.parametrize("equal", [200, 290])
def test_equal_rows_among_others(equal: int, in_float64: list[slice]) -> None:
    """Also where the only ones that are not are fewer than are taken at once."""
    reference, labels, generator = logits(300, 4099, 2.0, 5.0)
    candidate = reference.clone()
    candidate[equal:] += 0.01 * torch.randn(300 - equal, 4099, generator=generator)
    found, expected = figures(reference, candidate, labels), definitions(reference, candidate, labels)
    assert not in_float64
    assert found.kl_min == found.kl_median == 0.0
    assert found.kl_mean == pytest.approx(expected["kl_mean"], rel=1e-6)
    assert found.log_ratio == pytest.approx(expected["log_ratio"], rel=1e-5)
    assert found.cosine == pytest.approx(expected["cosine"], rel=1e-12)


def test_outputs_that_are_no_distribution(in_float64: list[slice]) -> None:
    generator = torch.Generator().manual_seed(1)
    reference = torch.randn(50, 6000, generator=generator)
    candidate = reference + 3.0 * torch.randn(50, 6000, generator=generator)  # however far: nothing is taken to a power
    comparison = OutputComparison(False)
    comparison.add(reference, candidate)
    found, expected = comparison.result(), definitions(reference, candidate, torch.zeros(50, dtype=torch.int64))
    assert not in_float64
    for name in ("mean_abs", "max_abs", "rel_l2", "cosine"):
        assert getattr(found, name) == pytest.approx(expected[name], rel=1e-6), name


def test_rows_known_beforehand_give_the_same(in_float64: list[slice]) -> None:
    """What is kept of a reference serves every candidate after it, of any dtype."""
    reference, labels, generator = logits(60, 4096, 2.0, 5.0)
    of_reference = OutputComparison(True).reference_rows(reference)
    for scale, dtype in ((0.0, torch.float32), (0.01, torch.bfloat16), (3.0, torch.float16), (0.01, torch.float64)):
        candidate = (reference + scale * torch.randn(60, 4096, generator=generator)).to(dtype)
        with_rows = OutputComparison(True)
        with_rows.add(reference, candidate, labels, of_reference=of_reference)
        alone = OutputComparison(True)
        alone.add(reference, candidate, labels)
        assert with_rows.result() == alone.result()
    assert RowsInFloat32.can_take(reference, reference.half())
