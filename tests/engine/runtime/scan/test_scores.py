"""Errors of scores against drawn samples whose true scores are known, and against the exact scan."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import torch
from tests.helpers import architectures
from tests.helpers.rank_correlation import FLOOR

import dtype_engine as de
from dtype_engine.runtime.scan.scores import SequenceScores, combine_scores

DTYPES = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8")
WEIGHTS = 30


def drawn(
    random: np.random.Generator, sequences: int, draws: int, spread: float
) -> tuple[list[SequenceScores], dict[tuple[str, str], float]]:
    """A scan whose samples are squares of Gaussian numbers, and the exact scores of its sequences.

    spread: the standard deviation of the logarithms of the ratios of a weight's dtypes, and of the scores between sequences.
    """
    keys = [(f"w{weight}", dtype) for weight in range(WEIGHTS) for dtype in DTYPES]
    level = {name: math.exp(random.normal()) for name, _ in keys}
    ratio = {key: level[key[0]] * math.exp(spread * random.normal()) for key in keys}
    done, truths = [], dict.fromkeys(keys, 0.0)
    for _ in range(sequences):
        own = {name: math.exp(spread * random.normal()) for name in level}
        true = {key: own[key[0]] * ratio[key] for key in keys}
        sums = {key: value * random.chisquare(draws) / draws for key, value in true.items()}
        done.append(SequenceScores(1.0, sums, {key: own[key[0]] for key in keys}))
        truths = {key: value + true[key] / sequences for key, value in truths.items()}
    return done, truths


@pytest.mark.parametrize(("sequences", "draws"), [(1, 24), (2, 12), (6, 4), (24, 4)])
@pytest.mark.parametrize("spread", [0.0, 0.2, 0.5])
def test_true_scores_are_within_two_standard_errors_in_19_of_20_cases(
    sequences: int, draws: int, spread: float
) -> None:
    random = np.random.default_rng(0)
    hits, errors, misses = [], [], []
    for _ in range(10):
        done, truths = drawn(random, sequences, draws, spread)
        wanted = dict.fromkeys((name for name, _ in truths), DTYPES)
        for key, (score, error) in combine_scores(done, wanted, draws, lambda name, dtype: False).items():
            assert error is not None
            hits.append(abs(score - truths[key]) < 2 * error)
            errors.append(error / truths[key])
            misses.append(abs(score / truths[key] - 1))
    assert statistics.fmean(hits) >= 0.95
    assert statistics.median(errors) < 2.5 * math.hypot(*misses) / math.sqrt(len(misses)) + spread


def test_exact_scores_are_within_two_errors_of_estimates_in_19_of_20_cases() -> None:
    module, _ = architectures.make("llama")
    generator = torch.Generator().manual_seed(5)
    ids = [torch.randint(3, architectures.VOCABULARY, (1, 16), generator=generator) for _ in range(2)]
    session = de.open(module, inputs=[{"input_ids": each} for each in ids])
    scan, exact = (session.scan(DTYPES[::2], exact=exact) for exact in (False, True))
    truths = exact.scores()
    rows = [row for row in scan.weights if truths[row.name, row.dtype] > FLOOR]
    hits = [abs(row.score - truths[row.name, row.dtype]) < 2 * (row.error or 0.0) for row in rows]
    assert len(rows) >= 40
    assert statistics.fmean(hits) >= 0.95
