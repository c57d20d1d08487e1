"""The word for a drift, and whether the limits between words are what the help says."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import dtype_engine as de
from dtype_engine.reports.document import drift_section
from dtype_engine.reports.notebook import drift_repr
from dtype_engine.reports.text_drift import floor_lines
from dtype_engine.results.attribution import NoiseFloor
from dtype_engine.results.drift import OutputDrift
from dtype_engine.results.meaning import HELP, SQNR_SIGNS, cosine_at, meaning, rounding_sqnr_db, sqnr_limits


def drift(kl_mean: float | None = None, sqnr_db: float = 40.0, max_abs: float = 1.0, nonfinite: int = 0) -> OutputDrift:
    return OutputDrift(
        elements=10, mean_abs=0.1, max_abs=max_abs, rel_l2=10 ** (-sqnr_db / 20), sqnr_db=sqnr_db, cosine=1.0,
        nonfinite=nonfinite, kl_mean=kl_mean,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kl", "word"),
    [
        (9e-5 / 10, "invisible"),
        (2.515e-5 / 1.1, "invisible"),
        (3.69e-4, "small"),  # q8_0 of LLaMA-2-7B, in the same table
        (1.355e-3, "small"),
        (5.45e-3, "visible"),  # q6_K
        (3.1273e-2, "visible"),
        (0.10, "visible"),  # q3_K_M
        (0.546, "broken"),  # iq2_XS: perplexity 10.8 for 6.2
        (2.2, "broken"),  # iq1_S: perplexity 58
    ],
)
def test_drift_word_follows_from_the_mean_kl(kl: float, word: str) -> None:
    assert meaning(drift(kl, sqnr_db=200.0)).word == word


@pytest.mark.parametrize(
    ("kl", "top1", "error", "found"),
    [
        (1.2e-3, 0.859, 0.012, "visible: no worse than llama.cpp Q2_K in same top-1"),  # fp8 experts of Mixtral
        (1.2e-3, 0.93, 0.001, "visible: no worse than llama.cpp Q4_K_M in same top-1"),
        (1.2e-3, 0.9767, 0.001, "small: no worse than llama.cpp Q8_0"),
        (1e-5, 0.98, 0.001, "small: no worse than llama.cpp Q8_0 in same top-1"),
        (1e-5, 7 / 8, 0.125, "invisible: no worse than a bfloat16 model in float16"),  # one of eight may be chance
        (1e-5, 0.0, None, "invisible: no worse than a bfloat16 model in float16"),  # one position tells no error
        (0.01, 0.99, 0.001, "visible: no worse than llama.cpp Q4_K_M"),
        (0.01, 0.5, 0.02, "broken: worse than llama.cpp Q2_K in same top-1"),
        (0.6, 0.5, 0.02, "broken: worse than llama.cpp Q2_K"),
    ],
)
def test_worse_of_mean_kl_and_same_top1_gives_the_word(kl: float, top1: float, error: float | None, found: str) -> None:
    output = replace(drift(kl), top1_agreement=top1, values={"top1_agreement_se": error} if error is not None else {})
    assert str(meaning(output)) == found
    word = next((word for least, word in sqnr_limits(output) if output.sqnr_db >= least), "broken")
    assert found.startswith(word), "a module with the output's SQNR has the output's word"


@pytest.mark.parametrize("sqnr_db", [5.0, 28.0, 43.0, 60.0])
@pytest.mark.parametrize("kl", [None, 0.0, -1e-9, math.nan, 1e-6, 2.5e-5, 2.77e-4, 1.355e-3, 0.01, 0.4451, 0.6])
def test_drift_word_changes_at_each_listed_limit_of_the_sqnr(kl: float | None, sqnr_db: float) -> None:
    output = drift(kl, sqnr_db)
    limits = sqnr_limits(output)
    assert [least for least, _ in limits] == sorted((least for least, _ in limits), reverse=True)
    word = next((word for least, word in limits if sqnr_db >= least), "broken")
    assert word == meaning(output if kl and kl > 0 else drift(None, sqnr_db)).word


def sqnr(exact: torch.Tensor, held: torch.Tensor) -> float:
    return 10 * math.log10(float((exact**2).sum() / ((exact - held) ** 2).sum()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_sqnr_of_rounding_in_torch_is_above_the_computed_minimum(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    least = rounding_sqnr_db(round(-math.log2(torch.finfo(dtype).eps)))
    of_many_magnitudes = torch.pow(2.0, 6 * torch.rand(400_000, generator=generator, dtype=torch.float64) - 3)
    normal = torch.randn(400_000, generator=generator, dtype=torch.float64)
    for exact in (of_many_magnitudes, normal):
        assert least + 2.5 < sqnr(exact, exact.to(dtype).double()) < least + 3.8


def test_minimum_sqnr_of_rounding_is_reached_for_mantissas_near_1() -> None:
    exact = 1 + torch.rand(400_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 64
    assert rounding_sqnr_db(10) == pytest.approx(sqnr(exact, exact.to(torch.float16).double()), abs=0.1)


def test_rounded_normal_values_get_the_drift_word_that_fits_their_dtype() -> None:
    exact = torch.randn(400_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rounded = exact.to(torch.bfloat16).double()
    assert meaning(drift(sqnr_db=sqnr(exact, rounded))).word == "invisible"
    assert meaning(drift(sqnr_db=sqnr(exact, exact.to(torch.float8_e4m3fn).double()))).word == "small"
    assert sqnr(exact, exact.sign() * exact.abs().mean()) == pytest.approx(SQNR_SIGNS, abs=0.02)
    cosine = float(torch.nn.functional.cosine_similarity(exact, rounded, dim=0))
    assert 1 - cosine_at(sqnr(exact, rounded)) == pytest.approx(1 - cosine, rel=0.01)


@pytest.mark.parametrize(
    ("db", "word"), [(75.0, "invisible"), (54.0, "invisible"), (48.0, "small"), (25.0, "visible"), (3.0, "broken")]
)
def test_drift_word_follows_from_sqnr_for_outputs_without_probabilities(db: float, word: str) -> None:
    assert meaning(drift(sqnr_db=db)).word == word


def test_words_exact_broken_and_under_the_floor_take_precedence_over_drift_limits() -> None:
    assert meaning(drift(0.0, math.inf, 0.0)).word == "exact"
    assert meaning(drift(1e-9, nonfinite=1)).word == "broken"
    assert meaning(drift(None, math.nan)).word == "broken"
    floor = NoiseFloor(("eager attention",), 256, 45.0, 1e-5, 10**-2.25, 1e-4, 1.0)
    assert meaning(drift(9e-5), floor).word == "under the floor"
    assert meaning(drift(2e-4), floor).word == "small"
    assert meaning(drift(sqnr_db=46.0), floor).word == "under the floor"
    assert meaning(drift(sqnr_db=46.0), NoiseFloor((), 0, 0.0, 0.0, 0.0)).word == "small"


def test_help_on_drift_words_names_every_limit_and_its_source() -> None:
    limits = (
        "2.5e-05",
        "1.4e-03",
        "0.031",
        "0.445",
        "99.7 %",
        "97.7 %",
        "91.9 %",
        "71.1 %",
        "52.9 dB",
        "28.9 dB",
        "4.4 dB",
    )
    for words in ("llama.cpp", "LLaMA-3-8B", *limits):
        assert words in HELP


class Saturated(nn.Module):
    """Has a softmax whose largest score is so far from the others that rounding does not change its result."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scores = nn.Linear(8, 4)
        with torch.no_grad():
            self.scores.bias.copy_(torch.tensor([0.0, 500.0, 0.0, 0.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores(x).softmax(-1)


def test_report_of_an_identical_output_says_that_modules_drift() -> None:
    model, x = Saturated(), torch.randn(5, 8)
    with torch.no_grad():
        r = model.scores(x).double()
        rounded = x.bfloat16() @ model.scores.weight.bfloat16().T + model.scores.bias.bfloat16()
    session = de.open(model, inputs=(x,), options=de.Options(settings=de.RunSettings(float_inputs="model")))
    assert str(meaning((report := session.drift()).output, None, report.modules)) == "exact: nothing differs"
    session.cast("*", "bfloat16")
    report = session.drift()
    assert report.output.max_abs == 0
    found = str(meaning(report.output, None, report.modules))
    decibels = 20 * math.log10(float(r.norm() / (rounded.double() - r).norm()))
    assert decibels == pytest.approx(report.modules[0].sqnr_db, abs=1.0)  # one rounding of the sum more or less
    assert found == f"exact: the output is identical, while 1 module drifts, worst {report.modules[0].sqnr_db:.2f} dB"
    assert found in drift_repr(report)
    assert found.removeprefix("exact: ") in str(drift_section(report))
    assert floor_lines(None, report.output, report.modules) == [f"meaning    {found}"]
