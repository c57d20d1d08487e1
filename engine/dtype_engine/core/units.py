"""Numbers with their units, as every text of the program writes them: bytes, counts, shares, seconds, dB."""

from __future__ import annotations

import math


def human_bytes(size: float) -> str:
    """`1.42 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    raise AssertionError


def human_count(count: float) -> str:
    """`707.8 k`, `6.7 G`, `1.0 T`: thousands, millions, and so on. A billion is no `B`, which stands for bytes beside it."""
    for unit in ("", " k", " M", " G", " T"):
        if abs(count) < (999.95 if unit else 999.5) or unit == " T":
            return f"{count:.0f}" if not unit else f"{count:.1f}{unit}"
        count /= 1000
    raise AssertionError


def percent(share: float) -> str:
    """Whole percents; a share that is there is never shown as 0, nor one that is not whole as 100."""
    if 0 < share < 0.01:
        return "<1"
    if 0.99 < share < 1:
        return ">99"
    return f"{100 * share:.0f}"


def change_text(before: int, after: int) -> str:
    """`54.9 % less` of bytes that were and will be; "" where none were, or as many will be."""
    if not before or before == after:
        return ""
    return f"{100 * abs(after / before - 1):.1f} % {'less' if after < before else 'more'}"


def share_text(count: int, whole: int) -> str:
    """A count, with its share of the whole where there is one: `-`, `17`, `1.2 M 3.4 %`."""
    if not count:
        return "-"
    share = 100 * count / whole
    return f"{human_count(count)} {share:.1f} %" if share >= 0.1 else human_count(count)


def seconds_text(seconds: float) -> str:
    """`12.3 ms`, `1.24 s`."""
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def time_left(seconds: float) -> str:
    """`12 s`, `3 min`, `1.5 h`: an estimate, so of no more digits."""
    if seconds < 59.5:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 3570 else f"{seconds / 3600:.1f} h"


def decibels(value: float | None) -> str:
    """`46.50 dB`; in words where it is not finite."""
    if value is None:
        return "not comparable"
    if math.isnan(value):
        return "not finite"
    if math.isinf(value):
        return "exact" if value > 0 else "not finite"
    return f"{value:.2f} dB"


def percent_with_error(share: float, error: float | None) -> str:
    """`99.12 ± 0.08 %`."""
    return f"{100 * share:.2f}" + (f" ± {100 * error:.2f} %" if error is not None else " %")


def plural(count: int, noun: str) -> str:
    """`1 tensor`, `1,200 tensors`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def with_error(value: float, error: float | None) -> str:
    """`1.69e-07 ± 2.1e-08`."""
    return f"{value:.4e}" + (f" ± {error:.1e}" if error is not None else "")
