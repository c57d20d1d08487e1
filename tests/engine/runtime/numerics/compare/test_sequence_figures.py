"""The figures of positions of logits against their definitions in extended precision, by numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dtype_engine.runtime.numerics.compare import sequence_figures as module
from dtype_engine.runtime.numerics.compare.sequence_figures import PositionFigures, sequence_figures

Long = np.longdouble
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def logits(
    rows: int, classes: int, spread: float = 2.0, certain: float = 5.0, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Generator]:
    """Some logits, of which one of each row stands out, and labels that often are that one."""
    generator = torch.Generator().manual_seed(rows + classes)
    reference = offset + spread * torch.randn(rows, classes, generator=generator)
    top = torch.randint(0, classes, (rows,), generator=generator)
    reference[torch.arange(rows), top] += certain
    labels = torch.where(torch.arange(rows) % 3 > 0, top, torch.randint(0, classes, (rows,), generator=generator))
    return reference, labels, generator


def figures(reference: torch.Tensor, candidate: torch.Tensor, labels: torch.Tensor | None = None) -> PositionFigures:
    found = sequence_figures(reference, candidate, True, labels).positions
    assert found is not None
    return found


def acceptance(reference: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    found = sequence_figures(reference, candidate, True, acceptance=True).positions
    assert found is not None
    assert found.accepted is not None
    return found.accepted


def check(reference: torch.Tensor, candidate: torch.Tensor, labels: torch.Tensor) -> None:
    """Compare with the definitions."""
    found = figures(reference, candidate, labels)
    r, c = (each.double().numpy().astype(Long) for each in (reference, candidate))
    log_p, log_q = (
        x - x.max(-1, keepdims=True) - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True))
        for x in (r, c)
    )
    kl = (np.exp(log_p) * (log_p - log_q)).sum(-1)
    of_labels = np.arange(len(r)), labels.numpy()
    size = max(1.0, float(np.abs(r).max()), float(np.abs(c).max()))
    assert found.kl.numpy() == pytest.approx(kl.astype(float), rel=1e-12, abs=2e-15 * size)
    assert found.same_top.tolist() == (r.argmax(-1) == c.argmax(-1)).tolist()
    assert found.log_p.numpy() == pytest.approx(log_p[of_labels].astype(float), rel=1e-13, abs=2e-15 * size)
    assert found.log_q.numpy() == pytest.approx(log_q[of_labels].astype(float), rel=1e-13, abs=2e-15 * size)
    accepted = np.minimum(np.exp(log_p), np.exp(log_q)).sum(-1)
    assert acceptance(reference, candidate).numpy() == pytest.approx(accepted.astype(float), rel=1e-12 + 2e-15 * size)


DISTRIBUTIONS = (
    (0.6, 0.0, 0.0, 4e-3), (3.0, 12.0, 0.0, 0.05), (3.0, 4.0, -200.0, 0.02), (3.0, 2.0, 60.0, 0.1), (2.0, 8.0, 0.0, 1e-4),
    (3.0, 20.0, 0.0, 4.0), (3.0, 5.0, 2000.0, 20.0),
)  # fmt: skip
"""Spread, how far the certain class stands out, offset, and drift."""
SHAPES = ((1, 1), (1, 2), (40, 4099), (5, 50_257), (2, 150_000))


@pytest.mark.parametrize("shape", range(len(SHAPES)), ids=lambda index: "x".join(map(str, SHAPES[index])))
@pytest.mark.parametrize("distribution", range(len(DISTRIBUTIONS)), ids=lambda index: str(DISTRIBUTIONS[index]))
def test_kl_and_log_probabilities_of_logits_equal_their_definitions(shape: int, distribution: int) -> None:
    """Flat and certain distributions, those whose exponentials are out of range, and what rounding alone moves.

    The dtypes take turns, so that each meets every shape and every distribution.
    """
    (rows, classes), (spread, certain, offset, drift) = SHAPES[shape], DISTRIBUTIONS[distribution]
    dtype = DTYPES[(shape + distribution) % len(DTYPES)]
    reference, labels, generator = logits(rows, classes, spread, certain, offset)
    candidate = (reference + drift * torch.randn(rows, classes, generator=generator)).to(dtype)
    check(reference, candidate, labels)
    check(candidate, reference, labels)


@pytest.mark.parametrize("factor", [-1.0, 0.0, 1e-14, 0.01, 100.0])
def test_kl_of_logits_of_another_scale_equals_its_definition(factor: float) -> None:
    reference, labels, _ = logits(20, 999)
    check(reference, factor * reference, labels)


def test_kl_of_strided_and_transposed_logits_equals_its_definition() -> None:
    wide, labels, _ = logits(60, 500)
    candidate = wide.bfloat16()
    for reference, other in (
        (wide[::3, 7:400], candidate[::3, 7:400]),
        (wide.double().T.contiguous().T[:20], candidate[:20]),
        (wide[:1].expand(20, -1), candidate[:20]),
    ):
        check(reference, other, labels[:20] % reference.shape[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_first_of_equal_largest_logits_counts_as_top_1(dtype: torch.dtype) -> None:
    """Also of zeros of either sign, and where all are negative."""
    reference, candidate = torch.zeros(6, 4100), torch.full((6, 4100), -3.0)
    for row, columns in enumerate(((0, 4099), (5, 4099), (0, 16), (17, 33), (0, 2100), (15, 16))):
        candidate[row, list(columns)] = -1.0
    assert figures(reference, candidate.to(dtype)).same_top.tolist() == [True, False, True, False, True, False]
    signs = torch.tensor([[-0.0, 0.0] * 20, [0.0, -0.0] * 20], dtype=dtype)
    assert figures(signs, signs.flip(0)).same_top.all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_rows_of_logits_have_zero_kl(dtype: torch.dtype) -> None:
    reference, _, generator = logits(300, 4099)
    candidate = reference.to(dtype).to(torch.promote_types(dtype, torch.float32))
    reference = candidate.clone()
    candidate[200:] += 0.01 * torch.randn(100, 4099, generator=generator)
    found = figures(reference, candidate)
    assert not found.kl[:200].any()
    assert found.same_top[:200].all()
    assert (found.kl[200:] > 0).all()
    accepted = acceptance(reference, candidate)
    assert (accepted[:200] == 1).all()
    assert (accepted[200:] < 1).all()


def test_kl_is_never_negative() -> None:
    reference, _, _ = logits(500, 1000, offset=100.0)
    candidate = reference.double()
    candidate[:, 7] += 1e-9
    assert (figures(reference, candidate).kl >= 0).all()


@pytest.mark.parametrize("of_candidate", [-math.inf, 3.0])
def test_class_with_zero_reference_probability_adds_nothing_to_kl(of_candidate: float) -> None:
    """0 ln 0 = 0, whatever the candidate's probability is."""
    reference, _, generator = logits(30, 500)
    candidate = reference + 0.1 * torch.randn(30, 500, generator=generator)
    reference[:, 11], candidate[:, 11] = -math.inf, of_candidate
    r, c = (np.delete(each.double().numpy().astype(Long), 11, 1) for each in (reference, candidate))
    p = np.exp(r) / np.exp(r).sum(-1, keepdims=True)
    total = np.exp(c).sum(-1, keepdims=True) + np.exp(Long(of_candidate))
    kl = (p * (np.log(p) - c + np.log(total))).sum(-1)
    assert figures(reference, candidate).kl.numpy() == pytest.approx(kl.astype(float), rel=1e-12)


def test_class_with_zero_candidate_probability_makes_kl_infinite() -> None:
    reference, _, _ = logits(3, 50)
    candidate = reference.clone()
    candidate[1, 4] = -math.inf
    assert figures(reference, candidate).kl.tolist() == [0.0, math.inf, 0.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["reference", "candidate", "both"])
@pytest.mark.filterwarnings("error")
def test_nonfinite_rows_of_logits_do_not_affect_the_kl_of_others(side: str, bad: float) -> None:
    reference, labels, generator = logits(200, 4099)
    candidate = reference + 0.01 * torch.randn(200, 4099, generator=generator)
    expected = figures(reference, candidate, labels)
    for name, output in (("reference", reference), ("candidate", candidate)):
        if side in (name, "both"):
            output[150, 3] = bad
    found = figures(reference, candidate, labels)
    others = torch.arange(200) != 150
    assert found.kl[others].tolist() == expected.kl[others].tolist()
    assert found.log_q[others].tolist() == expected.log_q[others].tolist()
    assert bool(torch.isnan(found.kl[150])) == (bad != -math.inf)
    accepted = acceptance(reference, candidate)
    assert bool(torch.isnan(accepted[150])) == (bad != -math.inf)
    assert bool(((accepted[others] > 0.9) & (accepted[others] < 1)).all())


def test_kl_of_no_rows_is_empty_and_ignored_labels_are_left_out() -> None:
    reference, labels, _ = logits(7, 30)
    assert figures(reference[:0], reference[:0]).kl.tolist() == []
    assert figures(reference, reference).log_p.tolist() == []
    labels[2:5] = -100
    found = figures(reference, reference.half(), labels)
    kept = [0, 1, 5, 6]
    assert found.log_q.tolist() == figures(reference[kept], reference[kept].half(), labels[kept]).log_q.tolist()


@pytest.mark.parametrize("elements", [1, 7000, 1 << 20])
def test_kl_does_not_depend_on_chunk_size_and_threads(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    reference, labels, _ = logits(203, 700)
    candidate = reference.half()
    expected = sequence_figures(reference, candidate, True, labels)
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", elements)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(sequence_figures(reference, candidate, True, labels))
    finally:
        torch.set_num_threads(before)
    one, three = (each.positions for each in found)
    assert one is not None
    assert three is not None
    assert expected.positions is not None
    assert found[0].sums == found[1].sums
    assert one.kl.tolist() == three.kl.tolist()
    assert one.log_q.tolist() == three.log_q.tolist()
    assert found[0].sums.noise == pytest.approx(expected.sums.noise, rel=1e-13)
    assert one.kl.numpy() == pytest.approx(expected.positions.kl.numpy(), rel=1e-12, abs=2e-15)


def test_acceptance_of_distributions_that_share_no_class_is_zero() -> None:
    reference, candidate = torch.zeros(2, 9), torch.zeros(2, 9)
    reference[:, :4], candidate[:, 4:] = -math.inf, -math.inf
    assert acceptance(reference, candidate).tolist() == [0.0, 0.0]
    candidate[1, 4:6] = 0.0  # of the reference's five equal classes and the candidate's six, two are shared: 2 / 6
    assert acceptance(reference, candidate).tolist() == [0.0, pytest.approx(2 / 6, rel=1e-15)]


def test_acceptance_of_masked_classes_equals_that_of_the_others() -> None:
    reference, _, generator = logits(20, 700)
    candidate = reference + 0.5 * torch.randn(20, 700, generator=generator)
    expected = acceptance(reference[:, 100:], candidate[:, 100:])
    reference[:, :100] = candidate[:, :100] = -math.inf
    assert acceptance(reference, candidate).numpy() == pytest.approx(expected.numpy(), rel=1e-14)


@pytest.mark.parametrize("elements", [1, 7000, 1 << 20])
def test_acceptance_does_not_depend_on_chunk_size_and_changes_no_other_figure(
    elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, labels, _ = logits(203, 700)
    candidate = reference.half()
    candidate[9, 9] = math.nan
    expected = acceptance(reference, candidate)
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", elements)
    without = sequence_figures(reference, candidate, True, labels)
    found = sequence_figures(reference, candidate, True, labels, acceptance=True)
    assert without.positions is not None
    assert without.positions.accepted is None
    assert found.positions is not None
    assert found.positions.accepted is not None
    assert found.positions.accepted.numpy() == pytest.approx(expected.numpy(), rel=1e-14, nan_ok=True)
    assert repr(found.sums) == repr(without.sums)
    for name in ("kl", "same_top", "log_p", "log_q"):
        assert repr(getattr(found.positions, name).tolist()) == repr(getattr(without.positions, name).tolist()), name
