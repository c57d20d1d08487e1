"""Formats sentences about weight values that a cast makes infinite or zero, or clips. This program calls such values lost."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
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
    """Return a sentence that says how many values of one tensor a cast changed: `conv2_BN.running_var: 64 of 128 values became
    infinite in float16`.
    """
    return f"{printable(loss.tensor, 200)}: {loss_words(loss)}"


def loss_words(loss: ValueLoss) -> str:
    """Return how many values of one tensor its cast made infinite or zero, as in `64 of 128 values became infinite in float16`."""
    parts = []
    if loss.overflowed:
        parts.append(f"{_of(loss.overflowed, loss)} became infinite")
    if loss.vanished:
        parts.append(f"{f'{loss.vanished:,}' if parts else _of(loss.vanished, loss)} became zero")
    if loss.saturated:
        words = f"{loss.saturated:,}" if parts else _of(loss.saturated, loss)
        parts.append(f"{words} beyond its scale became the largest one")
    channels = ""
    if loss.channels and loss.vanished < loss.elements:
        channels = f", more than half of {plural(loss.channels, 'channel')}"
    return f"{' and '.join(parts)} in {loss.dtype}{channels}"


def _of(count: int, loss: ValueLoss) -> str:
    if loss.elements == 1:
        return "its one value"
    if count == loss.elements:
        return f"all {count:,} values"
    return f"{count:,} of {loss.elements:,} values"


def headline(losses: Sequence[ValueLoss]) -> str:
    """Return the numbers of values that casts made infinite or zero, over all tensors: `64 values became infinite, 12 became zero,
    in 2 tensors`. Returns "" if values became zero only by ordinary rounding (`ValueLoss.is_rounding`).
    """
    lost = severe(losses)
    if not lost:
        return ""
    overflowed, vanished = sum(loss.overflowed for loss in lost), sum(loss.vanished for loss in lost)
    saturated = sum(loss.saturated for loss in lost)
    parts = [f"{plural(overflowed, 'value')} became infinite"] if overflowed else []
    if vanished:
        parts.append(f"{f'{vanished:,}' if parts else plural(vanished, 'value')} became zero")
    if saturated:
        parts.append(f"{f'{saturated:,}' if parts else plural(saturated, 'value')} clipped")
    return f"{', '.join(parts)}, in {plural(len(lost), 'tensor')}"


def loss_sentences(losses: Sequence[ValueLoss], most: int = 8) -> list[str]:
    """Return sentences about the values that casts made infinite or zero: one for each of the first `most` tensors, how many more
    such tensors there are, and one for all tensors in which values became zero by ordinary rounding (`ValueLoss.is_rounding`).
    """
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
    """Return sentences about the values that casts made infinite or zero: one for each of the first `most` tensors, and how many
    more such tensors there are. Tensors with only ordinary rounding to zero (`ValueLoss.is_rounding`) are left out.
    """
    lost = severe(losses)
    lines = [loss_sentence(loss) for loss in lost[:most]]
    return [*lines, f"and {len(lost) - most:,} more tensors lose values"] if len(lost) > most else lines


def loss_lines(losses: Sequence[ValueLoss]) -> list[str]:
    """Return the lines of a terminal report about values that casts made infinite or zero, or an empty list if there are none.
    losses: an entry for each tensor with such values.
    """
    return [f"{'lost' if not index else '':<10} {line}" for index, line in enumerate(loss_sentences(losses))]


def loss_notice(losses: Sequence[ValueLoss]) -> str:
    """Return one line, for standard error or a notice, about values that casts made infinite or zero: the worst tensor and the
    number of others. Returns "" if values became zero only by ordinary rounding.
    """
    lost = severe(losses)
    if not lost:
        return ""
    more = f"; {len(lost) - 1:,} more tensors lose values" if len(lost) > 1 else ""
    return f"{loss_sentence(lost[0])}{more}"


def remedy_lines(remedy: LossRemedy | None) -> list[str]:
    """Return lines that suggest rules against casts that make values infinite or zero, with the drift without and with these rules.
    If `remedy` is None, the line says that no rules are needed.
    """
    if remedy is None:
        return ["suggest    nothing: no cast loses values, except by rounding"]
    casts = " ".join(f"--cast {shlex.quote(printable(rule, 300))}" for rule in remedy.rules)
    return [f"suggest    {casts}", f"           {remedy_words(remedy)}"]


def remedy_words(remedy: LossRemedy) -> str:
    """Return how the suggested rules change drift and size, as in `tried: SQNR 3.33 dB → 47.10 dB, planned 42.43 MiB → 42.43 MiB`,
    or why the rules were not tried.
    """
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
