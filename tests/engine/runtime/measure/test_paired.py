"""Paired errors, against many draws of examples and of resamples whose truth is known."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dtype_engine.core.errors import UserError
from dtype_engine.runtime.measure.paired import DRAWS, Examples, compare, epsilon_of

MANY = 100_000
"""Resamples whose standard deviation is known to within 0.3%."""


def test_paired_standard_error_of_a_mean_equals_that_of_many_resamples() -> None:
    """Each example is right or wrong on both sides; the candidate turns some right ones wrong and fewer wrong ones right."""
    rng = np.random.default_rng(0)
    chances = {(1, 1): 0.80, (1, 0): 0.05, (0, 1): 0.02, (0, 0): 0.13}
    count = 400
    drawn = rng.multinomial(count, list(chances.values()), size=MANY)
    truth = (drawn @ [candidate - reference for reference, candidate in chances]).std() / count
    errors = []
    for _ in range(300):
        pairs = rng.choice(len(chances), size=count, p=list(chances.values()))
        reference, candidate = (np.array(list(chances))[pairs, side].tolist() for side in (0, 1))
        found = compare("accuracy", Examples(reference), Examples(candidate))
        assert found.difference == pytest.approx(np.mean(candidate) - np.mean(reference))
        assert found.changed == sum(one != other for one, other in zip(reference, candidate, strict=True))
        errors.append(found.error)
    assert np.mean(errors) == pytest.approx(truth, rel=0.02)
    alone = math.sqrt(0.85 * 0.15 / count + 0.82 * 0.18 / count)
    assert truth < alone / 1.8  # pairing is what makes so small a change visible


def test_paired_standard_error_of_a_word_error_rate_equals_that_of_many_resamples() -> None:
    """The word error rate of a corpus is a ratio of sums, so no mean of examples."""
    rng = np.random.default_rng(1)
    words = rng.integers(5, 20, 25)
    wrong = rng.binomial(words, 0.1)
    worse = np.minimum(words, wrong + rng.binomial(1, 0.3, 25))
    counts = rng.multinomial(25, [1 / 25] * 25, size=MANY)
    truth = ((counts @ (worse - wrong)) / (counts @ words)).std()

    def rate(states: list[tuple[int, int]]) -> float:
        return sum(errors for errors, _ in states) / sum(said for _, said in states)

    states = [Examples(list(zip(each.tolist(), words.tolist(), strict=True)), rate) for each in (wrong, worse)]
    found = compare("wer", *states)
    assert found.resampled
    assert (found.reference, found.candidate) == (wrong.sum() / words.sum(), worse.sum() / words.sum())
    assert found.error == pytest.approx(truth, rel=3 / math.sqrt(2 * DRAWS))
    assert compare("wer", *states) == found


def test_paired_comparison_refuses_unequal_numbers_of_examples() -> None:
    with pytest.raises(UserError, match="2 examples on the reference and 1 on the candidate"):
        compare("accuracy", Examples([1, 0]), Examples([1]))
    with pytest.raises(UserError, match="0 examples"):
        compare("accuracy", Examples(), Examples())
    assert compare("accuracy", Examples([1]), Examples([0])).error is None
    broken = compare("loss", Examples([1.0, 2.0]), Examples([math.nan, 2.0]))
    assert broken.error is not None
    assert math.isnan(broken.error)
    assert math.isnan(broken.candidate)
    assert broken.changed == 1


def by_division(pairs: list[tuple[int, int]]) -> float:
    return sum(found and right for found, right in pairs) / sum(found for found, _ in pairs)


def by_nan(pairs: list[tuple[int, int]]) -> float:
    return by_division(pairs) if any(found for found, _ in pairs) else math.nan


def by_value_error(pairs: list[tuple[int, int]]) -> float:
    return statistics.fmean(right for found, right in pairs if found)  # raises StatisticsError, a ValueError


def by_key(pairs: list[tuple[int, int]]) -> float:
    return by_division({True: [pair for pair in pairs if pair[0]]}[any(found for found, _ in pairs)])


def by_none(pairs: list[tuple[int, int]]) -> float | None:
    return by_division(pairs) if any(found for found, _ in pairs) else None


@pytest.mark.parametrize("precision", [by_division, by_nan, by_value_error, by_key, by_none])
def test_resamples_without_the_metric_are_left_out_and_counted(precision: Callable[[list[Any]], Any]) -> None:
    """A precision where 2 of 12 examples are found: (10 / 12) ** 12 of the resamples have none of them."""
    reference, candidate = ([(at < 2, at < right) for at in range(12)] for right in (2, 1))
    found = compare("precision", Examples(reference, precision), Examples(candidate, precision))
    assert (found.reference, found.candidate, found.draws) == (1.0, 0.5, DRAWS)
    share = (10 / 12) ** 12
    assert abs(found.undefined - DRAWS * share) < 4 * math.sqrt(DRAWS * share * (1 - share))
    drawn = np.random.default_rng(0).multinomial(12, [1 / 12] * 12, size=MANY)[:, :2]
    drawn = drawn[drawn.sum(1) > 0]
    assert found.error == pytest.approx((drawn[:, 1] / drawn.sum(1)).std(), rel=4 / math.sqrt(2 * DRAWS))
    assert f"; undefined on {found.undefined} of 200 resamples, left out" in str(found)


def test_metric_that_is_undefined_itself_is_an_error() -> None:
    with pytest.raises(ZeroDivisionError):
        compare("precision", Examples([(0, 1)] * 4, by_division), Examples([(0, 1)] * 4, by_division))
    states = Examples([1, 2, 3], in_this_order)
    found = compare("ordered", states, states)
    assert (found.reference, found.error is None) == (1.0, found.undefined >= DRAWS - 1)
    assert found.undefined > 0.8 * DRAWS


def in_this_order(values: list[int]) -> float:
    """Defined on 1 of 27 resamples."""
    return {(1, 2, 3): 1.0}[tuple(values)]  # type: ignore[index]


@pytest.mark.parametrize(
    ("value", "epsilon"),
    [
        (0.5, 2.0**-52),
        (torch.tensor([0.5]), 2.0**-23),
        (torch.tensor(0.5, dtype=torch.float64), 2.0**-52),
        (torch.tensor([3]), 2.0**-52),
        (np.float32(0.5), 2.0**-23),
        (np.array([0.5]), 2.0**-52),
        ([1, (torch.tensor(0.5), 2)], 2.0**-23),
        ({"right": [torch.tensor(1)], "loss": torch.tensor(0.5, dtype=torch.bfloat16)}, 2.0**-23),
    ],
)
def test_spacing_of_floats_is_that_of_what_a_metric_returns(value: Any, epsilon: float) -> None:
    assert epsilon_of(value) == epsilon
