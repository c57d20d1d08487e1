"""Formats numbers with their units, in one way for the whole program: bytes, counts, shares, seconds, decibels."""

from __future__ import annotations

import math
from collections.abc import Sequence


def human_bytes(size: float) -> str:
    """Return a number of bytes as text, such as `1.42 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    raise AssertionError


def human_count(count: float) -> str:
    """Return a count, such as a number of parameters, as text: `707.8 k`, `6.7 B` (billion) or `671 B`."""
    for unit in ("", " k", " M", " B", " T"):
        if abs(count) < (999.95 if unit else 999.5) or unit == " T":
            return f"{count:.1f}".removesuffix(".0") + unit if unit else f"{count:.0f}"
        count /= 1000
    raise AssertionError


def percent(share: float) -> str:
    """Return a share from 0 to 1 as a whole number of percent. Only exactly 0 becomes `0`, and only exactly 1 becomes `100`."""
    if 0 < share < 0.01:
        return "<1"
    if 0.99 < share < 1:
        return ">99"
    return f"{100 * share:.0f}"


def apportioned(shares: Sequence[float], whole: int) -> list[int]:
    """Return integers whose sum is `whole`, in proportion to the shares, by the largest remainder. All are 0 if the shares are."""
    total = math.fsum(shares)
    if not total:
        return [0] * len(shares)
    exact = [whole * share / total for share in shares]
    found = [int(each) for each in exact]
    by_remainder = sorted(range(len(shares)), key=lambda index: found[index] - exact[index])
    for index in by_remainder[: whole - sum(found)]:
        found[index] += 1
    return found


def change_text(before: int, after: int) -> str:
    """Return the change from one number of bytes to another, such as `54.9 % less`, or "" if there is none."""
    if not before or before == after:
        return ""
    return f"{100 * abs(after / before - 1):.1f} % {'less' if after < before else 'more'}"


def share_text(count: int, whole: int) -> str:
    """Return a count, with its percentage of `whole` unless this is below 0.1 %: `1.2 M 3.4 %`. 0 is written as `-`."""
    if not count:
        return "-"
    share = 100 * count / whole
    return f"{human_count(count)} {share:.1f} %" if share >= 0.1 else human_count(count)


def perplexity_text(perplexity: float) -> str:
    """Return a perplexity as text: `12.3456`, or `1.5353e+14` if it is at least a million."""
    return f"{perplexity:.4f}" if perplexity < 1e6 else f"{perplexity:.4e}"


def less_error(gain: float) -> str:
    """Return by what factor an error became smaller, such as `3.20x less error`, or larger. gain: the error before, divided by the
    error after: infinity if it vanished, 0 if there was none.
    """
    if gain == math.inf:
        return "no error"
    if gain <= 0:
        return "more error"
    factor = max(gain, 1 / gain)
    if factor < 1.005:
        return "same error"
    return f"{factor:,.{2 if factor < 10 else 0}f}x {'less' if gain > 1 else 'more'} error"


def seconds_text(seconds: float) -> str:
    """Return a duration as text, such as `12.3 ms` or `1.24 s`."""
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def bandwidth_text(bandwidth: float) -> str:
    """Return a bandwidth in bytes per second as text, such as `3.35 TB/s`. The units are powers of 1000, as in data sheets."""
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        if bandwidth >= 1000**power:
            return f"{bandwidth / 1000**power:.4g} {unit}/s"
    return f"{bandwidth:.4g} B/s"


def token_time(milliseconds: float) -> str:
    """Return the time for a token as text, such as `1.25 ms a token (800 tokens/s)`."""
    rate = 1000 / milliseconds if milliseconds else math.inf
    rounded = f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
    return f"{milliseconds:.3g} ms a token ({rounded} tokens/s)"


def time_left(seconds: float) -> str:
    """Return an estimated remaining time, rounded coarsely, such as `12 s`, `3 min` or `1.5 h`."""
    if seconds < 59.5:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 3570 else f"{seconds / 3600:.1f} h"


def decibels(value: float | None) -> str:
    """Return decibels as text, such as `46.50 dB`; `exact` for infinity, `not finite` for NaN or -infinity, `not comparable` for
    None.
    """
    if value is None:
        return "not comparable"
    if math.isnan(value):
        return "not finite"
    if math.isinf(value):
        return "exact" if value > 0 else "not finite"
    return f"{round(value, 2) + 0.0:.2f} dB"  # without + 0.0, a small negative value is written as -0.00


def signed(value: float, digits: int) -> str:
    """Return a number with its sign and `digits` decimals, such as `+0.26`. A number that rounds to 0 gets the sign `+`."""
    return f"{round(value, digits) + 0.0:+.{digits}f}"


def percent_with_error(share: float, error: float | None) -> str:
    """Return a share and its error, both from 0 to 1, in percent: `99.12 ± 0.08 %`."""
    return f"{100 * share:.2f}" + (f" ± {100 * error:.2f} %" if error is not None else " %")


def scientific(value: float, digits: int = 2) -> str:
    """Return a number in scientific notation with an exponent as short as possible, such as `2.26e-5`."""
    mantissa, _, exponent = f"{value:.{digits}e}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


def plural(count: int, noun: str) -> str:
    """Return a count with its noun, such as `1 tensor` or `1,200 tensors`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def with_error(value: float, error: float | None) -> str:
    """Return a value and its error in scientific notation: `1.6900e-07 ± 2.1e-08`."""
    return f"{value:.4e}" + (f" ± {error:.1e}" if error is not None else "")
