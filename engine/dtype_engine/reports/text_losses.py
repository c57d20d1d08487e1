"""Formats sentences about weight values that a cast makes infinite or zero, or clips. This program calls such values lost."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from dtype_engine.core.text import printable
from dtype_engine.core.units import decibels, human_bytes, plural
from dtype_engine.results.losses import ValueLoss, severe

if TYPE_CHECKING:
    from dtype_engine.results.attribution import LossRemedy
    from dtype_engine.results.drift import OutputDrift

HELP = (
    "Values lost: finite values that a cast makes infinite, and values other than zero that it makes zero. Each tensor that "
    "loses values is listed by name, unless the loss is only rounding: fewer than 1 in 100 of its values became zero (in integers "
    "and below 8 bits any number, because all values under half a step become zero), and every channel kept at least half of its "
    "values."
)


def loss_sentence(loss: ValueLoss) -> str:
    """Return a sentence such as `conv2_BN.running_var: 64 of 128 values became infinite in float16`."""
    return f"{printable(loss.tensor, 200)}: {loss_words(loss)}"


def loss_words(loss: ValueLoss) -> str:
    """Return how many values of one tensor its cast changed, as in `64 of 128 values became infinite in float16`."""
    changes = {
        "became infinite": loss.overflowed,
        "became zero": loss.vanished,
        "beyond its scale became the largest one": loss.saturated,
    }
    parts = _counted(changes, lambda count: _of(count, loss))
    channels = ""
    if loss.channels and loss.vanished < loss.elements:
        channels = f", more than half of {plural(loss.channels, 'channel')}"
    return f"{' and '.join(parts)} in {loss.dtype}{channels}"


def _counted(changes: Mapping[str, int], of_what: Callable[[int], str]) -> list[str]:
    """Return changes with their numbers, as in `64 of 128 values became infinite`. Only the first number gets a noun. of_what:
    returns a number with its noun, such as `64 of 128 values`.
    """
    counts = [(words, count) for words, count in changes.items() if count]
    return [f"{f'{count:,}' if place else of_what(count)} {words}" for place, (words, count) in enumerate(counts)]


def _of(count: int, loss: ValueLoss) -> str:
    if loss.elements == 1:
        return "its one value"
    if count == loss.elements:
        return f"all {count:,} values"
    return f"{count:,} of {loss.elements:,} values"


def _others(count: int) -> str:
    return f"{plural(count, 'more tensor')} lose{'s' if count == 1 else ''} values"


def headline(losses: Sequence[ValueLoss]) -> str:
    """Return the numbers over all tensors: `64 values became infinite, 12 became zero, in 2 tensors`, or "" if all losses are only
    rounding.
    """
    lost = severe(losses)
    if not lost:
        return ""
    changes = {
        "became infinite": sum(loss.overflowed for loss in lost),
        "became zero": sum(loss.vanished for loss in lost),
        "clipped": sum(loss.saturated for loss in lost),
    }
    parts = _counted(changes, lambda count: plural(count, "value"))
    return f"{', '.join(parts)}, in {plural(len(lost), 'tensor')}"


def loss_sentences(losses: Sequence[ValueLoss], most: int = 8) -> list[str]:
    """Return the sentences of `severe_sentences`, and a sentence about all tensors in which values became zero only by rounding."""
    lines = severe_sentences(losses, most)
    rounded = [loss for loss in losses if loss.is_rounding]
    if rounded:
        count, elements = sum(loss.vanished for loss in rounded), sum(loss.elements for loss in rounded)
        names = {loss.dtype for loss in rounded}
        where = printable(rounded[0].tensor, 200) if len(rounded) == 1 else f"{len(rounded):,} tensors"
        lines.append(
            f"{where}: {count:,} of {elements:,} values became zero in {'/'.join(sorted(names))}, which is rounding"
        )
    return lines


def severe_sentences(losses: Sequence[ValueLoss], most: int = 8) -> list[str]:
    """Return a sentence for each of the first `most` tensors whose losses are not only rounding. If there are more such tensors, a
    last sentence says how many.
    """
    lost = severe(losses)
    lines = [loss_sentence(loss) for loss in lost[:most]]
    return [*lines, f"and {_others(len(lost) - most)}"] if len(lost) > most else lines


def loss_lines(losses: Sequence[ValueLoss]) -> list[str]:
    """Return the sentences of `loss_sentences` as lines for a terminal."""
    return [f"{'lost' if not index else '':<10} {line}" for index, line in enumerate(loss_sentences(losses))]


def loss_notice(losses: Sequence[ValueLoss]) -> str:
    """Return one line about the worst tensor and the number of others, or "" if values became zero only by ordinary rounding."""
    lost = severe(losses)
    if not lost:
        return ""
    more = f"; {_others(len(lost) - 1)}" if len(lost) > 1 else ""
    return f"{loss_sentence(lost[0])}{more}"


def remedy_lines(remedy: LossRemedy | None) -> list[str]:
    """Return lines that suggest rules against casts that lose values, or say that none are needed."""
    if remedy is None:
        return ["suggest    nothing: no cast loses values, except by rounding"]
    return [suggestion(remedy.rules), f"           {remedy_words(remedy)}"]


def suggestion(rules: Sequence[str]) -> str:
    """Return a line with the options that add these rules."""
    return "suggest    " + " ".join(f"--cast {shlex.quote(printable(rule, 300))}" for rule in rules)


def remedy_words(remedy: LossRemedy) -> str:
    """Return words such as `tried: SQNR 3.33 dB → 47.10 dB, planned 42.43 MiB → 42.43 MiB`, or why the rules were not tried."""
    size = f"planned {human_bytes(remedy.planned_bytes_before)} → {human_bytes(remedy.planned_bytes)}"
    if remedy.before is None or remedy.after is None:
        return f"not tried: {printable(remedy.reason, 400)}; {size}"
    worse = "" if remedy.improves else " (no better)"
    return f"tried: {_drift(remedy.before)} → {_drift(remedy.after).removeprefix('SQNR ')}{worse}, {size}"


def _drift(output: OutputDrift) -> str:
    if output.nonfinite:
        return f"{output.nonfinite:,} not finite"
    kl = f", mean KL {output.kl_mean:.3e}" if output.kl_mean is not None else ""
    return f"SQNR {decibels(output.sqnr_db)}{kl}"
