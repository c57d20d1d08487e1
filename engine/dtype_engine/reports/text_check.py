"""Formats the findings of a checkpoint check as text, as JSON, and as SARIF, which code hosts and editors show next to files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtype_engine.core.text import printable
from dtype_engine.core.units import plural, seconds_text
from dtype_engine.reports.sarif import result, sarif, uri_of
from dtype_engine.results.as_json import as_json
from dtype_engine.results.check import KINDS, CheckReport, Finding
from dtype_engine.results.figures import FIGURES
from dtype_engine.results.model_card import CardCheck

if TYPE_CHECKING:
    from dtype_engine.checkpoint import Checkpoint

SHOWN = 20
"""The maximum number of findings of one kind that the text lists."""


def check_text(report: CheckReport) -> str:
    """Return the report as text: the findings by kind, with the reason why each kind matters."""
    share = f"; {report.coverage}" if report.coverage is not None else ""
    read = [plural(report.tensors, "header"), plural(report.scales, "tensor") + " of scales"]
    read += [f"the values of {plural(report.values, 'tensor')}"] if report.values is not None else []
    lines = [f"model      {report.model}{share}", f"checked    {', '.join(read)}, in {seconds_text(report.seconds)}"]
    lines += [f"against    {report.against}"] if report.against is not None else []
    lines += [f"unchecked  {sentence}" for sentence in report.unchecked]
    lines += card_lines(report.card) if report.card is not None else []
    for kind, found in by_kind(report).items():
        row = KINDS[kind]
        lines += ["", f"{len(found):,} x {kind}: {row.title}", f"  why   {row.why}"]
        lines += [f"  seen  {', '.join(row.seen)}"] if row.seen else []
        lines += [f"    {printable(each.tensor)} {printable(each.what, 1000)}" for each in found[:SHOWN]]
        lines += [f"    and {len(found) - SHOWN:,} more"] if len(found) > SHOWN else []
    lines += ["", plural(len(report.findings), "finding")] if report.findings else ["nothing found"]
    return "\n".join(lines)


def card_lines(card: CardCheck) -> list[str]:
    """Return the figures of a model card beside the repeated ones, with the difference that is allowed."""
    rows = [("", "card", "now", "may differ by", "")]
    for each in card.figures:
        unit = " dB" if each.name in FIGURES and FIGURES[each.name].unit == " dB" else ""
        allowed = f"{each.allowed:.1e}{unit}" if each.allowed else "0"
        now = "not measured" if each.now is None else each.now.text
        rows.append((each.name, each.card.text, now, allowed, "holds" if each.holds else "does NOT hold"))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    notes = [f"  {difference}" for difference in card.differences]
    return [f"card       {card.file}; measured again on {card.inputs}", *(f"  {line}" for line in lines), *notes]


def by_kind(report: CheckReport) -> dict[str, list[Finding]]:
    """Return the findings of each kind, in the order of `KINDS`."""
    found: dict[str, list[Finding]] = {kind: [] for kind in KINDS}
    for finding in report.findings:
        found[finding.kind].append(finding)
    return {kind: each for kind, each in found.items() if each}


def check_json(report: CheckReport) -> dict[str, Any]:
    """Return the report as an object for JSON, with a description of each kind of problem that was found."""
    return {**as_json(report), "kinds": {kind: as_json(KINDS[kind]) for kind in by_kind(report)}}


def check_sarif(report: CheckReport, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the findings as SARIF, with a rule for each kind and a result for each finding. checkpoint: what was checked."""
    rules = {
        kind: (KINDS[kind].title, " ".join((KINDS[kind].why, *(f"Seen in {issue}." for issue in KINDS[kind].seen))))
        for kind in by_kind(report)
    }
    results = (
        result(each.kind, f"{printable(each.tensor)} {printable(each.what, 1000)}", each.tensor, _uri(each, checkpoint))
        for each in report.findings
    )
    return sarif("check", rules, results)


def _uri(finding: Finding, checkpoint: Checkpoint) -> str:
    """Return the URI of the file that has a finding. If there is no such file, return the URI of a file that describes the model.
    Returns "" for a model on a hub.
    """
    return "" if checkpoint.headers_alone else uri_of(next(filter(Path.is_file, _files_of(finding, checkpoint))))


def _files_of(finding: Finding, checkpoint: Checkpoint) -> Iterator[Path]:
    folder = checkpoint.folder
    if (tensor := checkpoint.tensors.get(finding.tensor)) is not None:
        yield tensor.file
    yield folder / finding.file
    if checkpoint.index is not None:
        yield folder / checkpoint.index.name
    yield from (folder / name for name in ("config.json", "adapter_config.json", "model_index.json"))
    yield from checkpoint.files
