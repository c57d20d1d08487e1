"""Formats the tokens that a candidate would choose in texts of the reference as text."""

from __future__ import annotations

from itertools import pairwise

from dtype_engine.core.text import printable
from dtype_engine.core.units import plural
from dtype_engine.results.token_choices import EDGES, FirstDifference, TextChoices, TokenReport, severity_text

MARKS = {"tie": "({} | {})", "different": "⟦{} | {}⟧"}
"""How a token that differs is shown: that of the text, and the candidate's."""


_PROMPT = 120
"""Maximum number of characters shown of a prompt: the last ones."""


def token_text(report: TokenReport) -> str:
    """Return a report with each text in one line. A tie is marked as in `(a | b)`, another difference as in `⟦a | b⟧`: first the
    reference's token, then the candidate's.
    """
    lines = [
        f"model      {report.model} on {report.device}",
        f"rules      {', '.join(report.rules) or 'none: as stored'}",
        f"inputs     {report.inputs}",
        *(f"{name:<10} {words}" for name, words in summary_rows(report)),
    ]
    for text in report.texts:
        prompt = text.prompt if len(text.prompt) <= _PROMPT else f"…{text.prompt[-_PROMPT:]}"
        lines += ["", f"prompt     {_line(prompt)}", f"reference  {_line(marked_text(text))}"]
    return "\n".join(lines)


def summary_rows(report: TokenReport) -> list[tuple[str, str]]:
    """Return (name, text) of the counts and, if a token differs, of the margin, the histogram and the first difference."""
    rows = [("tokens", f"{report.tokens:,}: {shares_text(report)}")]
    largest, first = report.largest_severity, report.first_difference
    if largest is None:
        return rows
    rows.append(("tie", margin_text(report)))
    rows.append(("severity", f"{histogram_text(report)}; largest {severity_text(largest)}"))
    return [*rows, ("first", first_text(first))] if first is not None else rows


def shares_text(report: TokenReport) -> str:
    """Return how many of the tokens are of each kind, such as `190 identical (99.0 %), 2 ties (1.0 %), 0 different`."""
    parts = []
    for kind, count in report.counts.items():
        words = plural(count, "tie") if kind == "tie" else f"{count:,} {kind}"
        parts.append(f"{words} ({100 * count / report.tokens:.1f} %)" if count else words)
    return ", ".join(parts)


def margin_text(report: TokenReport) -> str:
    """Return words that say which differences are ties."""
    if report.margin is None:
        return "none: no noise floor was measured, so every token that differs counts as different"
    return f"up to {severity_text(report.margin)}: what another order of arithmetic changes ({report.margin_from})"


def histogram_text(report: TokenReport) -> str:
    """Return how many tokens that differ have which severity, as in `3 at <0.05, 2 at 0.5–1, 1 at ≥2 nats`. Empty bins are left
    out.
    """
    inner = (f"{low:g}–{high:g}" for low, high in pairwise(EDGES))
    names = [f"<{EDGES[0]:g}", *inner, f"≥{EDGES[-1]:g}"]
    return (
        ", ".join(f"{count} at {name}" for count, name in zip(report.histogram, names, strict=True) if count) + " nats"
    )


def first_text(first: FirstDifference) -> str:
    """Return where the candidate first differs, and by how much."""
    own, other = (printable(piece.replace("\n", "⏎"), 40) for piece in (first.reference_piece, first.candidate_piece))
    where = f"prompt {first.prompt + 1}, token {first.token + 1}"
    return f"{where}: {own!r} in the text, {other!r} by the candidate, {severity_text(first.severity)}"


def marked_text(text: TextChoices) -> str:
    """Return a text with the candidate's tokens beside those from which they differ."""
    return "".join(
        MARKS[kind].format(own, other) if kind in MARKS else own
        for own, other, kind in zip(text.reference.pieces, text.candidate_pieces, text.kinds, strict=True)
    )


def counts_text(text: TextChoices) -> str:
    """Return how many tokens of one text differ, such as `1 tie, 2 different`."""
    ties, different = text.kinds.count("tie"), text.kinds.count("different")
    return f"{plural(ties, 'tie')}, {different:,} different"


def _line(text: str) -> str:
    return printable(text.replace("\n", "⏎"), 10_000)
