"""Texts about the weight values that casts make infinite, clip or make zero: for the Drift pane, the tree and the history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dtype_engine.core.text import printable
from dtype_engine.core.tree import ancestors
from dtype_engine.reports.text_losses import loss_sentences, remedy_words
from dtype_engine.results.losses import ValueLoss, severe

if TYPE_CHECKING:
    from dtype_engine.results.attribution import LossRemedy

_MOST_SENTENCES = 3


def loss_marks(losses: Sequence[ValueLoss]) -> Mapping[str, str]:
    """Return marks such as `⚠ 64 inf 12 zero`, by node name. Tensors in which casts make values infinite or zero or clip them have
    a mark, and so have all modules above them. Tensors in which values only became zero by rounding have none.
    """
    sums: dict[str, list[int]] = {}
    for loss in severe(losses):
        for name in (loss.tensor, *ancestors(loss.tensor)):
            counts = sums.setdefault(name, [0, 0, 0])
            for i, count in enumerate((loss.overflowed, loss.vanished, loss.saturated)):
                counts[i] += count
    return {name: loss_mark(*counts) for name, counts in sums.items()}


def loss_mark(overflowed: int, vanished: int, saturated: int = 0) -> str:
    """Return a mark such as `⚠ 64 inf 12 zero` from counts of values made infinite, made zero and clipped. "" if all are 0."""
    parts = [(overflowed, "inf"), (vanished, "zero"), (saturated, "clipped")]
    words = " ".join(f"{count:,} {what}" for count, what in parts if count)
    return f"⚠ {words}" if words else ""


def loss_rows(
    lost: Sequence[ValueLoss] | None, reason: str, remedy: LossRemedy | None, remedy_next: bool
) -> list[tuple[str, str]]:
    """Return rows (label, text) of the Drift pane about values that casts make infinite or zero or clip.

    lost: the tensors with such values, or None if these are unknown. reason: why they are unknown. remedy: rules that keep the
    values, if known. remedy_next: whether the next press of the key for remedies applies these rules.
    """
    if lost is None:
        return [("values", printable(reason, 300))] if reason else []
    sentences = loss_sentences(lost, _MOST_SENTENCES) if severe(lost) else []
    rows = [("⚠ lost" if not index else "", line) for index, line in enumerate(sentences)]
    if remedy is not None and rows:
        rules = ", ".join(printable(rule, 200) for rule in remedy.rules)
        rows.append(("a applies" if remedy_next else "then a", rules))
        rows.append(("", remedy_words(remedy)))
    return rows
