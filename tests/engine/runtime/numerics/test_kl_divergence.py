"""The figures over distributions against scripts of another hand: llama.cpp's statistics, and transformers alone."""

from __future__ import annotations

import json
import math
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import spatial
from tests.helpers import preloaded
from tests.helpers.kl_divergence import logits_of, statistics
from tests.helpers.paths import DEMO

from dtype_engine.results.drift import NAMES
from dtype_engine.results.meaning import meaning
from dtype_engine.runtime.numerics.compare.metrics import OutputMetrics


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some Python, which is what the demo model was trained on."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(Path(textwrap.__file__).read_text(encoding="utf-8")[:4000], encoding="utf-8")
    return path


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_llama_cpp_statistics_equal_those_of_an_independent_script(text: Path, dtype: str) -> None:
    done = preloaded.run(preloaded.COMMAND, "drift", "--cast", f"*={dtype}", "--text", str(text), "--json")
    found = json.loads(done.stdout)["output"]
    source = text.read_text(encoding="utf-8")
    reference, tokens = logits_of(DEMO, source, "float32")
    candidate, _ = logits_of(DEMO, source, dtype)
    expected = statistics(reference, candidate, tokens)
    assert len(expected) == 45
    assert expected["positions"] > 1000
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-6, abs=1e-13), name
    delta, r = np.concatenate(candidate) - np.concatenate(reference), np.concatenate(reference)
    assert found["mean_abs"] == pytest.approx(np.abs(delta).mean(), rel=1e-9)
    assert found["sqnr_db"] == pytest.approx(20 * math.log10(np.linalg.norm(r) / np.linalg.norm(delta)), rel=1e-9)
    assert 1 - found["cosine"] == pytest.approx(spatial.distance.cosine(r.ravel(), (r + delta).ravel()), rel=1e-4)


def test_kl_statistics_of_fixed_tensors_equal_those_of_an_independent_script() -> None:
    generator = torch.Generator().manual_seed(5)
    reference = torch.randn(3, 90, 17, generator=generator) * 2
    candidate = reference + 0.3 * torch.randn(3, 90, 17, generator=generator)
    tokens = torch.randint(0, 17, (3, 90), generator=generator)
    comparison = OutputMetrics(-1)
    for r, c, ids in zip(reference, candidate, tokens, strict=True):
        comparison.add(r[None], c[None], torch.cat([ids[1:], ids.new_full((1,), -100)])[None])
    found = comparison.result()
    expected = statistics(*(list(values.double().numpy()) for values in (reference, candidate)), list(tokens.numpy()))
    for name, value in expected.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-9), name


def test_single_position_has_no_standard_errors_and_no_percentiles() -> None:
    comparison = OutputMetrics(-1)
    comparison.add(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1.0, 2.5, 3.0]]), torch.tensor([1]))
    found = comparison.result()
    assert (found.positions, found.scored_tokens) == (1, 1)
    p, q = (torch.tensor(logits).double().softmax(-1) for logits in ([1.0, 2.0, 3.0], [1.0, 2.5, 3.0]))
    assert found.kl_mean == pytest.approx(float((p * (p / q).log()).sum()))
    assert found.kl_min == found.kl_median == found.kl_max == found.kl_mean
    assert found.dp_mean == pytest.approx(float(q[1] - p[1]))
    assert found.perplexity_candidate == pytest.approx(1 / float(q[1]))
    for name in NAMES:
        if name.endswith("_se") or "_p" in name or name == "perplexity_correlation":
            assert getattr(found, name) is None, name


def test_identical_outputs_have_zero_standard_errors() -> None:
    logits = torch.randn(120, 9, generator=torch.Generator().manual_seed(1))
    comparison = OutputMetrics(-1)
    comparison.add(logits, logits.clone(), torch.arange(120) % 9)
    found = comparison.result()
    assert found.dp_rms == found.dp_rms_se == found.dp_max == found.dp_min == found.kl_p01 == 0
    assert found.perplexity_correlation == pytest.approx(1)
    assert (found.perplexity_ratio, found.perplexity_ratio_se, found.perplexity_difference) == (1, 0, 0)
    assert found.perplexity_difference_se == pytest.approx(0, abs=1e-6)


def test_nan_and_infinity_in_the_reference_are_counted_but_not_masks() -> None:
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(1))
    logits[0, 0], logits[1, 1], logits[2, 2] = math.nan, math.inf, -math.inf
    comparison = OutputMetrics(-1)
    comparison.add(logits, logits.clone())
    found = comparison.result()
    assert (found.nonfinite, found.nonfinite_reference) == (0, 2)


@pytest.mark.parametrize("width", [9, 5000])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_positions_with_a_nonfinite_reference_do_not_count_as_agreement(width: int, value: float) -> None:
    generator = torch.Generator().manual_seed(1)
    reference = torch.randn(120, width, generator=generator)
    candidate = reference + 0.01 * torch.randn(120, width, generator=generator)
    reference[3:], candidate[3:] = value, value
    comparison = OutputMetrics(-1)
    comparison.add(reference, candidate, torch.arange(120) % 9)
    found = comparison.result()
    assert (found.nonfinite, found.nonfinite_reference) == (0, 117 * width)
    difference = (candidate[:3] - reference[:3]).double()
    assert found.mean_abs == pytest.approx(float(difference.abs().mean()), rel=1e-6)
    assert found.sqnr_db == pytest.approx(
        10 * math.log10(float(reference[:3].double().square().sum() / difference.square().sum())), rel=1e-6
    )
    none = (
        "kl_mean",
        "kl_median",
        "kl_p1",
        "kl_max",
        "top1_agreement",
        "dp_mean",
        "dp_p1",
        "log_ratio",
        "perplexity_candidate",
    )
    assert {name: getattr(found, name) for name in none if not math.isnan(getattr(found, name))} == {}
    assert str(meaning(found)) == "broken: not finite"


def test_metrics_need_little_memory_beyond_the_logits() -> None:
    done = preloaded.run(preloaded.module("tests.helpers.metrics_memory"), "128", "256000", "64")
    assert float(done.stdout) < 50


def test_outputs_that_are_nan_on_both_sides_do_not_count_as_equal() -> None:
    logits = torch.full((2, 3), math.nan)
    comparison = OutputMetrics(None)
    comparison.add(logits, logits.clone())
    found = comparison.result()
    assert (found.nonfinite, found.nonfinite_reference) == (0, 6)
    assert all(math.isnan(value) for value in (found.sqnr_db, found.max_abs, found.cosine, found.rel_l2))
