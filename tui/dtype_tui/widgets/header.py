"""The line at the top: which model is open, how many bytes are planned in which dtypes, and what the drift means."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
from rich.text import Text

from dtype_engine.core.text import printable
from dtype_engine.core.units import decibels, scientific
from dtype_tui.rendering.cells import short_bytes, stacked, truncate
from dtype_tui.rendering.palette import ramp, verdict_pill

if TYPE_CHECKING:
    from dtype_tui.state.experiment import Experiment


class _Part(msgspec.Struct, frozen=True):
    text: Text
    importance: int
    """If not all parts of the line fit, those with the highest numbers are left out."""
    gap: int = 2
    """The number of blanks before this part of the line."""


def header_line(experiment: Experiment, width: int) -> Text:
    """Return the line of `width` cells: the model, the bytes and a rating of the drift. Less important parts are left out first."""
    left, right = _about_model(experiment, width), [*_about_bytes(experiment, width), *_about_drift(experiment)]
    shown: list[_Part] = []
    used = 3  # the blanks at both ends, and one between left and right
    for part in sorted((*left, *right), key=lambda part: part.importance):
        if used + part.gap + part.text.cell_len <= width:
            shown.append(part)
            used += part.gap + part.text.cell_len
    begin, end = (_joined([part for part in parts if part in shown]) for parts in (left, right))
    between = " " * max(1, width - begin.cell_len - end.cell_len - 2)
    return Text.assemble(" ", begin, between, end, " ", no_wrap=True)


def _joined(parts: list[_Part]) -> Text:
    line = Text()
    for part in parts:
        line.append_text(Text.assemble(" " * (part.gap if line else 0), part.text))
    return line


def _about_model(experiment: Experiment, width: int) -> list[_Part]:
    model, totals = experiment.model, experiment.totals[""]
    known = model.has_tree and not model.partial and (totals.parameters or totals.unknown)
    where = printable(model.device or model.host, 30)
    parts = (
        (Text(truncate(printable(model.title, 40), max(12, width // 4)), style="bold"), 0),
        (Text(printable(model.class_name, 40), style="dim"), 8),
        (Text(f"{totals.parameters_text} params" if known else "", style="dim"), 7),
        (Text(where, style="dim"), 5),
    )
    return [_Part(text, importance) for text, importance in parts if text]


def _about_bytes(experiment: Experiment, width: int) -> list[_Part]:
    plan = experiment.plan
    stored, planned = plan.stored_bytes, plan.planned_bytes
    if experiment.model.partial or not stored:
        return []
    before, now = short_bytes(stored), short_bytes(planned)
    if before.partition(" ")[2] == now.partition(" ")[2]:
        now = now.partition(" ")[0]
    words = Text(f"{now} of {before}" if planned != stored else before, style="bold")
    share = planned / max(stored, planned)
    bar = Text.assemble(*stacked(experiment.totals[""].mix(), 20 if width >= 140 else 12, share))
    parts = [_Part(words, 2), _Part(bar, 6)]
    if planned != stored:
        less = f"{100 * abs(planned / stored - 1):.0f} % {'less' if planned < stored else 'more'}"
        parts.append(_Part(Text(less, style="green" if planned < stored else "yellow"), 4, gap=1))
    return parts


def _about_drift(experiment: Experiment) -> list[_Part]:
    report = experiment.results.report
    if report is None:
        return [_Part(Text(*verdict_pill("broken")), 1)] if experiment.results.failure else []
    from dtype_engine.results.meaning import meaning  # imported late, for a faster first paint

    output = report.output
    found = meaning(output, experiment.floor, report.modules)
    parts = [_Part(Text(*verdict_pill(found.word)), 1)]
    if output.max_abs != 0:
        figure = decibels(output.sqnr_db)
        if output.kl_mean is not None:
            figure = "not finite" if math.isnan(output.kl_mean) else f"KL {scientific(output.kl_mean)}"
        parts.append(_Part(Text(figure, style=ramp(found.word)), 3, gap=1))
    if output.top1_agreement is not None:
        parts.append(_Part(Text(f"top-1 {100 * output.top1_agreement:.1f} %", style="dim"), 9))
    return parts
