"""Limits on figures and on the user's metrics: what meets them in floats, and what is not finite."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from dtype_engine.results.drift import OutputDrift
from dtype_engine.results.metrics import MetricChange
from dtype_engine.results.thresholds import Limit, Verdict, verdicts

SINGLE = float(np.finfo(np.float32).eps)


def output(**others: Any) -> OutputDrift:
    figures = {
        "elements": 8,
        "mean_abs": 0.1,
        "max_abs": 0.2,
        "rel_l2": 0.1,
        "sqnr_db": 20.0,
        "cosine": 1.0,
        "nonfinite": 0,
    }
    return OutputDrift(**(figures | others))


def verdict(limit: Limit, *metrics: MetricChange, **others: Any) -> Verdict:
    (found,) = verdicts([limit], output(**others), metrics)
    return found


def change(reference: float, candidate: float, epsilon: float = 2.0**-52) -> MetricChange:
    return MetricChange("score", reference, candidate, None, 100, 1, epsilon=epsilon)


def test_change_of_whole_percents_meets_a_limit_of_as_many() -> None:
    """All changes between hundredths, in float64 and in float32, against exact fractions."""
    contradicting = 0
    for before in range(101):
        for after in range(101):
            exact = Fraction(after - before, 100)
            for kind in (np.float64, np.float32):
                one, other = (float(kind(count) / kind(100)) for count in (before, after))
                epsilon = float(np.finfo(kind).eps)
                for sign, option in ((-1, "min"), (1, "max")):
                    limit = Limit.parse(f"score={sign:+d}%", option)  # type: ignore[arg-type]
                    meets = exact >= Fraction(-1, 100) if option == "min" else exact <= Fraction(1, 100)
                    assert verdict(limit, change(one, other, epsilon)).passed == meets, (one, other, option)
                    plain = other - one >= -0.01 if option == "min" else other - one <= 0.01
                    contradicting += plain != meets
    assert contradicting > 20, "plain comparisons of floats are wrong here"


def test_tolerance_is_a_few_spacings_and_no_more() -> None:
    limit = Limit.parse("score=-1%", "min")
    assert verdict(limit, change(1.0, 0.99 - 2e-16)).passed
    assert not verdict(limit, change(1.0, 0.99 - 1e-14)).passed
    assert not verdict(limit, change(1.0, 0.99 - 1e-5, SINGLE)).passed
    assert verdict(Limit.parse("sqnr_db=20", "min"), sqnr_db=math.nextafter(20.0, 0.0)).passed
    assert not verdict(Limit("max_kl", "kl_mean", 0.0), kl_mean=1e-12).passed
    assert not verdict(Limit.parse("score=5", "max"), change(1.0, math.inf)).passed


def test_missed_limit_shows_by_how_much() -> None:
    found = verdict(Limit("min_sqnr", "sqnr_db", 30.0), sqnr_db=29.99999999)
    assert str(found) == "SQNR 29.99999999 dB: under the limit, 30 dB"
    assert found.short == "SQNR 29.99999999 < 30 dB"
    assert str(verdict(Limit("max_kl", "kl_mean", 1e-3), kl_mean=1e-3)) == "mean KL 0.001 nats: at most 0.001 nats"


@pytest.mark.parametrize(("reference", "candidate"), [(math.nan, 0.95), (0.95, math.nan), (math.nan, math.nan)])
@pytest.mark.parametrize("text", ["score=0.9", "score=-1%"])
def test_metric_that_is_nan_on_either_side_misses_its_limit(reference: float, candidate: float, text: str) -> None:
    found = verdict(Limit.parse(text, "min"), change(reference, candidate))
    assert not found.passed
    assert "not finite in the reference or in the candidate" in str(found)


@pytest.mark.parametrize("counts", [{"nonfinite": 1, "nonfinite_candidate": 1}, {"nonfinite_reference": 1}])
def test_output_that_is_not_finite_meets_no_limit(counts: dict[str, int]) -> None:
    """The likeliest class of an output of NaN may be right by chance."""
    assert verdict(Limit.parse("score=0.9", "min"), change(1.0, 1.0)).passed
    assert not verdict(Limit.parse("score=0.9", "min"), change(1.0, 1.0), **counts).passed
    assert not verdict(Limit.parse("max_abs=1", "max"), **counts).passed
