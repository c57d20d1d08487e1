"""What a drift means, in one word, by limits that others have published or that follow from the dtypes themselves.

An output over classes or tokens is judged by its mean KL, any other by its SQNR. The limits of KL are figures of LLaMA-3-8B on
Wikitext-2, from the README of llama.cpp's `llama-perplexity`. Those of SQNR are the sizes of a rounding of the output itself:
what a value in that dtype can't avoid.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dtype_engine.core import dtypes
from dtype_engine.core.units import decibels, plural

if TYPE_CHECKING:
    from dtype_engine.results.attribution import NoiseFloor
    from dtype_engine.results.drift import ModuleDrift, OutputDrift

Word = Literal["exact", "under the floor", "invisible", "small", "visible", "broken"]


def rounding_sqnr_db(mantissa: int) -> float:
    """The least SQNR in dB of values that are rounded to a float of so many mantissa bits, the implicit one not counted.

    A value m 2^e with 1 <= m < 2 is off by anything up to half a unit in the last place: 2^(2e - 2 mantissa) / 12 in the mean
    square, of m^2 2^(2e). Where all m are 1 that is 6.02 dB a bit and 10.8; values of many magnitudes have 2.7 to 3.7 dB more.
    """
    return 10 * math.log10(12 * 4**mantissa)


def cosine_at(sqnr_db: float) -> float:
    """The cosine of an output whose error has this SQNR and no direction of its own."""
    return 1 / math.sqrt(1 + 10 ** (-sqnr_db / 10))


KL_FLOATS = 2.5e-5
"""float16 against bfloat16; 99.74 % of the positions have the same top token."""
KL_Q8 = 1.355e-3
"""q8_0 against float16; 97.67 %."""
KL_Q4 = 3.127e-2
"""q4_K_M against float16; 91.90 %."""
KL_Q2 = 0.4451
"""q2_K against float16; 71.14 %, and the perplexity is 1.56 times as high."""
SQNR_BF16 = rounding_sqnr_db(dtypes.BY_NAME["bfloat16"].mantissa)
SQNR_FP8 = rounding_sqnr_db(dtypes.BY_NAME["float8_e4m3fn"].mantissa)
SQNR_SIGNS = -10 * math.log10(1 - 2 / math.pi)
"""What is left where of every value of a normal distribution only the sign is kept, and its best magnitude (Max 1960)."""

_KL: tuple[tuple[float, Word, str], ...] = (
    (KL_FLOATS, "invisible", "up to that of float16 against bfloat16"),
    (KL_Q8, "small", "up to that of q8_0"),
    (KL_Q4, "visible", "between q8_0 and q4_K_M"),
    (KL_Q2, "visible", "between q4_K_M and q2_K"),
)
_SQNR: tuple[tuple[float, Word, str], ...] = (
    (SQNR_BF16, "invisible", "up to bfloat16's rounding"),
    (SQNR_FP8, "small", "between bfloat16's and fp8's rounding"),
    (SQNR_SIGNS, "visible", "between fp8's and 1-bit rounding"),
)
"""By the worst that a word is for: what the drift is compared with."""

HELP = (
    "One word says what a drift means. Exact: nothing differs. Under the floor: no more than the reference drifts from itself. "
    "Then, where the output is a distribution, by mean KL in nats, as llama.cpp published it for LLaMA-3-8B on Wikitext-2: "
    f"invisible up to {KL_FLOATS:.1e} (float16 against bfloat16), small up to {KL_Q8:.1e} (q8_0), visible up to {KL_Q2:.3f} "
    f"(q2_K; q4_K_M has {KL_Q4:.3f}), broken beyond. Elsewhere by SQNR, against what rounding the output itself can cost: "
    f"invisible from {SQNR_BF16:.1f} dB (bfloat16; cosine {cosine_at(SQNR_BF16):.6f}), small from {SQNR_FP8:.1f} dB (fp8 e4m3; "
    f"{cosine_at(SQNR_FP8):.4f}), visible from {SQNR_SIGNS:.1f} dB (1 bit: signs alone), broken below. An output that is not "
    "finite is broken. Other models and texts may bear more or less."
)
"""The words, their limits and where these come from."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """The word, and what the drift was compared with: `up to that of q8_0`."""

    word: Word
    why: str

    def __str__(self) -> str:
        return f"{self.word}: {self.why}"


def _beneath(modules: Iterable[ModuleDrift]) -> str:
    """What an output that is identical says of the modules before it."""
    differing = [each for each in modules if each.nonfinite or each.sqnr_db not in (None, math.inf)]
    if not differing:
        return "nothing differs"
    worst = min((each.sqnr_db for each in differing if each.sqnr_db is not None), default=-math.inf)
    some_bad = any(each.nonfinite for each in differing)
    drifts = f"{plural(len(differing), 'module')} drift{'s' if len(differing) == 1 else ''}"
    return f"the output is identical, while {drifts}, worst {'not finite' if some_bad else decibels(worst)}"


def meaning(output: OutputDrift, floor: NoiseFloor | None = None, modules: Iterable[ModuleDrift] = ()) -> Meaning:
    """What a drift means. floor: the noise floor over the same inputs, where it is known. modules: the figures of modules, which
    may drift where the output does not: a saturated softmax hides it.
    """
    if output.nonfinite or math.isnan(output.sqnr_db):
        return Meaning("broken", "not finite")
    if output.max_abs == 0:
        return Meaning("exact", _beneath(modules))
    if floor is not None and floor.covers(output):
        return Meaning("under the floor", "noise")
    if output.kl_mean is not None:
        if math.isnan(output.kl_mean):
            return Meaning("broken", "not finite")
        for most, word, why in _KL:
            if output.kl_mean <= most:
                return Meaning(word, why)
        return Meaning("broken", "more than q2_K")
    for least, word, why in _SQNR:
        if output.sqnr_db >= least:
            return Meaning(word, why)
    return Meaning("broken", "more than 1-bit rounding")
