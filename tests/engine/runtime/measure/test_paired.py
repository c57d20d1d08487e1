"""Paired errors, against a million draws of examples and of resamples whose truth is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dtype_engine.core.errors import UserError
from dtype_engine.runtime.measure.paired import DRAWS, Examples, compare

MILLION = 1_000_000


def test_paired_error_of_a_mean_equals_that_of_a_million_resamples() -> None:
    """Each example is right or wrong on both sides; the candidate turns some right ones wrong and fewer wrong ones right."""
    rng = np.random.default_rng(0)
    chances = {(1, 1): 0.80, (1, 0): 0.05, (0, 1): 0.02, (0, 0): 0.13}
    count = 400
    drawn = rng.multinomial(count, list(chances.values()), size=MILLION)
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


def test_paired_error_of_a_word_error_rate_equals_that_of_a_million_resamples() -> None:
    """The word error rate of a corpus is a ratio of sums, so no mean of examples."""
    rng = np.random.default_rng(1)
    words = rng.integers(5, 20, 25)
    wrong = rng.binomial(words, 0.1)
    worse = np.minimum(words, wrong + rng.binomial(1, 0.3, 25))
    counts = rng.multinomial(25, [1 / 25] * 25, size=MILLION)
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
