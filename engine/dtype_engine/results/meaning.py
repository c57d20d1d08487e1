"""Describes in one word what a drift means.

An output over classes or tokens is judged by its mean KL and its same top-1, by limits that were measured for LLaMA-3-8B on
Wikitext-2 (README of llama.cpp's `llama-perplexity`); the worse of both gives the word. Any other output is judged by its SQNR, by
the errors of rounding the output itself to a dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dtype_engine.core import dtypes
from dtype_engine.core.units import decibels, plural

if TYPE_CHECKING:
    from dtype_engine.results.attribution import NoiseFloor
    from dtype_engine.results.drift import ModuleDrift, OutputDrift

Word = Literal["exact", "under the floor", "invisible", "small", "visible", "broken"]
Grade = Literal["green", "yellow", "orange", "red"]
GRADES: Mapping[Word, Grade] = {
    "exact": "green", "under the floor": "green", "invisible": "green", "small": "yellow", "visible": "orange", "broken": "red",
}  # fmt: skip
"""The color of each word, on the screen and in reports."""


def rounding_sqnr_db(mantissa: int) -> float:
    """Return the lowest SQNR in dB of values rounded to a float with `mantissa` bits of mantissa, without the implicit bit.

    Rounding a value m 2^e with 1 <= m < 2 causes an error with a mean square of 2^(2e - 2 mantissa) / 12. The square of the value
    is m^2 2^(2e). The worst case is m = 1; values of many magnitudes have 2.7 to 3.7 dB more.
    """
    return 10 * math.log10(12 * 4**mantissa)


def cosine_at(sqnr_db: float) -> float:
    """Return the cosine similarity for an SQNR in dB, assuming that the error is orthogonal to the reference."""
    return 1 / math.sqrt(1 + 10 ** (-sqnr_db / 10))


KL_FLOATS = 2.5e-5
"""The mean KL in nats of a bfloat16 model that runs in float16."""
KL_Q8 = 1.355e-3
"""The mean KL in nats of a float16 model in q8_0."""
KL_Q4 = 3.127e-2
"""The mean KL in nats of a float16 model in q4_K_M."""
KL_Q2 = 0.4451
"""The mean KL in nats of a float16 model in q2_K."""
TOP1_FLOATS = 0.9974
"""The same top-1 of these models: the share of positions at which both have the same most likely token."""
TOP1_Q8 = 0.9767
TOP1_Q4 = 0.9190
TOP1_Q2 = 0.7114
SQNR_BF16 = rounding_sqnr_db(dtypes.BY_NAME["bfloat16"].mantissa)
SQNR_FP8 = rounding_sqnr_db(dtypes.BY_NAME["float8_e4m3fn"].mantissa)
SQNR_SIGNS = -10 * math.log10(1 - 2 / math.pi)
"""The SQNR in dB of normally distributed values that keep only their signs, with the magnitude of the least error (Max 1960)."""

# Best word first: (at most this mean KL, at least this same top-1, word, comparison), and (at least this SQNR, word, comparison).
_KL: tuple[tuple[float, float, Word, str], ...] = (
    (KL_FLOATS, TOP1_FLOATS, "invisible", "no worse than a bfloat16 model in float16"),
    (KL_Q8, TOP1_Q8, "small", "no worse than llama.cpp Q8_0"),
    (KL_Q4, TOP1_Q4, "visible", "no worse than llama.cpp Q4_K_M"),
    (KL_Q2, TOP1_Q2, "visible", "no worse than llama.cpp Q2_K"),
)
_SQNR: tuple[tuple[float, Word, str], ...] = (
    (SQNR_BF16, "invisible", "no worse than rounding to bfloat16"),
    (SQNR_FP8, "small", "no worse than rounding to fp8"),
    (SQNR_SIGNS, "visible", "no worse than rounding to 1 bit"),
)


def sqnr_limits(output: OutputDrift | None) -> tuple[tuple[float, Word], ...]:
    """Return pairs (minimum SQNR in dB, word) for rating the SQNRs of modules, from the best word to the worst. A module whose SQNR
    equals the main output's SQNR gets the same word as `output`.

    If the output has a KL, the words' limits on the KL and the same top-1 are converted to SQNRs. The KL of a small error is
    proportional to the square of the error, so if the SQNR is 10 dB lower, the KL is ten times as large. The share of positions
    with another top-1 is proportional to the error.
    """
    sqnr = None if output is None else output.sqnr_db
    if output is None or not output.kl_mean or not output.kl_mean > 0 or sqnr is None or not math.isfinite(sqnr):
        return tuple((least, word) for least, word, _ in _SQNR)
    kl_mean, other_top1 = output.kl_mean, 1 - _likely_top1(output)

    def least(most_kl: float, least_top1: float) -> float:
        by_top1 = 20 * math.log10(other_top1 / (1 - least_top1)) if other_top1 > 0 else -math.inf
        return sqnr + max(10 * math.log10(kl_mean / most_kl), by_top1)

    return tuple((least(most_kl, least_top1), word) for most_kl, least_top1, word, _ in _KL)


def _likely_top1(output: OutputDrift) -> float:
    """Return the same top-1 plus two of its standard errors, or 1 if there is none or one position tells no error."""
    if output.top1_agreement is None or output.top1_agreement_se is None:
        return 1.0
    return output.top1_agreement + 2 * output.top1_agreement_se


HELP = (
    "One word says what a drift means. Exact: no value of the output differs. Under the floor: no more than the drift of the "
    "reference from itself. If the output is a distribution, the worse of its mean KL in nats and its same top-1 decides, by "
    "limits that llama.cpp published for LLaMA-3-8B on Wikitext-2: "
    f"invisible up to {KL_FLOATS:.1e} and from {100 * TOP1_FLOATS:.1f} % (a bfloat16 model in float16), "
    f"small up to {KL_Q8:.1e} and from {100 * TOP1_Q8:.1f} % (q8_0), "
    f"visible up to {KL_Q2:.3f} and from {100 * TOP1_Q2:.1f} % (q2_K; q4_K_M has {KL_Q4:.3f} and {100 * TOP1_Q4:.1f} %), "
    "otherwise broken. A same top-1 misses a limit if it is lower by more than two standard errors. "
    "For any other output its SQNR decides, by the SQNR of rounding "
    f"the output itself: invisible from {SQNR_BF16:.1f} dB (bfloat16; cosine {cosine_at(SQNR_BF16):.6f}), small from "
    f"{SQNR_FP8:.1f} dB (fp8 e4m3; {cosine_at(SQNR_FP8):.4f}), visible from {SQNR_SIGNS:.1f} dB (1 bit: signs "
    "alone), otherwise broken. An output that is not finite is broken. Other models and texts may tolerate more or less."
)
"""The help text about the words, their limits, and where these come from."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """A word that rates a drift, such as "small", and a comparison with a familiar drift: `no worse than llama.cpp Q8_0`."""

    word: Word
    why: str

    def __str__(self) -> str:
        return f"{self.word}: {self.why}"


def _module_drift_words(modules: Iterable[ModuleDrift]) -> str:
    differing = [each for each in modules if not each.is_finite or each.sqnr_db not in (None, math.inf)]
    if not differing:
        return "nothing differs"
    worst = min((each.sqnr_db for each in differing if each.sqnr_db is not None), default=-math.inf)
    some_bad = any(not each.is_finite for each in differing)
    drifts = f"{plural(len(differing), 'module')} drift{'s' if len(differing) == 1 else ''}"
    return f"the output is identical, while {drifts}, worst {'not finite' if some_bad else decibels(worst)}"


def meaning(output: OutputDrift, floor: NoiseFloor | None = None, modules: Iterable[ModuleDrift] = ()) -> Meaning:
    """Return a word that rates a drift, and the comparison on which it is based. floor: the noise floor for the same inputs, or
    None if not measured. modules: the drift of modules, which the comparison mentions if the output is exact.
    """
    if output.nonfinite_reference and not output.nonfinite:
        return Meaning("broken", "the reference itself is not finite")
    if output.nonfinite or math.isnan(output.sqnr_db or 0.0):
        return Meaning("broken", "not finite")
    if output.max_abs == 0:
        return Meaning("exact", _module_drift_words(modules))
    if floor is not None and floor.covers(output):
        return Meaning("under the floor", "noise")
    if output.kl_mean is not None:
        if math.isnan(output.kl_mean):
            return Meaning("broken", "not finite")
        return _by_kl_and_top1(output.kl_mean, _likely_top1(output))
    met = (Meaning(word, why) for least, word, why in _SQNR if (output.sqnr_db or 0.0) >= least)
    return next(met, Meaning("broken", "worse than rounding to 1 bit"))


def _by_kl_and_top1(kl_mean: float, top1: float) -> Meaning:
    rows: tuple[tuple[float, float, Word, str], ...] = (*_KL, (math.inf, 0.0, "broken", "worse than llama.cpp Q2_K"))
    by_kl = next(index for index, (most, *_) in enumerate(rows) if kl_mean <= most)
    by_top1 = next(index for index, (_, least, *_) in enumerate(rows) if top1 >= least)
    _, _, word, why = rows[max(by_kl, by_top1)]
    return Meaning(word, f"{why} in same top-1" if by_top1 > by_kl else why)
