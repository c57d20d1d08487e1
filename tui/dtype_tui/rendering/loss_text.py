"""Values that casts lose, as text: for the pane, the tree and the status line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dtype_engine.core.text import printable
from dtype_engine.core.tree import ancestors
from dtype_engine.reports.text_losses import headline, loss_sentences, remedy_words
from dtype_engine.results.losses import ValueLoss, severe

if TYPE_CHECKING:
    from dtype_engine.results.attribution import LossRemedy

_MOST_SENTENCES = 3


def loss_marks(losses: Sequence[ValueLoss]) -> Mapping[str, str]:
    """`⚠ 64 inf 12 zero` by the names of the tensors that lose values, and of the modules that they are in."""
    sums: dict[str, list[int]] = {}
    for loss in severe(losses):
        for name in (loss.tensor, *ancestors(loss.tensor)):
            counts = sums.setdefault(name, [0, 0, 0])
            for i, count in enumerate((loss.overflowed, loss.vanished, loss.saturated)):
                counts[i] += count
    return {name: loss_mark(*counts) for name, counts in sums.items()}


def loss_mark(overflowed: int, vanished: int, saturated: int = 0) -> str:
    """`⚠ 64 inf 12 zero`; "" for none."""
    parts = [(overflowed, "inf"), (vanished, "zero"), (saturated, "clipped")]
    words = " ".join(f"{count:,} {what}" for count, what in parts if count)
    return f"⚠ {words}" if words else ""


def loss_rows(
    lost: Sequence[ValueLoss] | None, reason: str, remedy: LossRemedy | None, remedy_next: bool
) -> list[tuple[str, str]]:
    """Rows of the Drift pane, (label, words): the tensors that lose values, and what keeps them.

    lost: None while that is not known, for `reason`. remedy_next: whether the key for what mends applies `remedy` next.
    """
    if lost is None:
        return [("values", reason)] if reason else []
    rows = [("⚠ lost" if not index else "", line) for index, line in enumerate(_sentences(lost))]
    if remedy is not None and rows:
        rules = ", ".join(printable(rule, 200) for rule in remedy.rules)
        rows.append(("a applies" if remedy_next else "then a", rules))
        rows.append(("", remedy_words(remedy)))
    return rows


def _sentences(losses: Sequence[ValueLoss]) -> list[str]:
    return loss_sentences(losses, _MOST_SENTENCES) if severe(losses) else []


def loss_status(losses: Sequence[ValueLoss]) -> str:
    """For the status line: `⚠ 64 values became infinite, in 1 tensor`."""
    words = headline(losses)
    return f"⚠ {words}" if words else ""
