"""Shows a session and its results in a notebook: sections of a report, as a fragment of HTML."""

from __future__ import annotations

from dtype_engine.core import dtypes
from dtype_engine.core.text import printable
from dtype_engine.core.tree import Tree
from dtype_engine.core.units import human_bytes, less_error, with_error
from dtype_engine.recipe import Plan, Recipe, make_plan
from dtype_engine.reports.blocks import Identifier, Report, Section, Table
from dtype_engine.reports.document import (
    drift_section,
    group_sections,
    picture_sections,
    rules_section,
    tree_section,
    worst_table,
)
from dtype_engine.reports.html import as_fragment
from dtype_engine.reports.overview import size_tile, verdict_tile
from dtype_engine.reports.text import cache_change_text
from dtype_engine.reports.text_scan import totals_heading
from dtype_engine.results.drift import DriftReport, worst_modules
from dtype_engine.results.figures import cells
from dtype_engine.results.meaning import meaning
from dtype_engine.results.scan import ScanReport

_ROWS = 12


def session_html(title: str, tree: Tree, plan: Plan, inputs: str) -> str:
    """Return HTML for an open model: its rules, and its modules with their dtypes and bytes. inputs: a description of the
    inputs.
    """
    sections = (rules_section(tree, plan), tree_section(tree, plan))
    size = f"{human_bytes(plan.stored_bytes)} stored, {human_bytes(plan.planned_bytes)} planned"
    return as_fragment(Report(f"Session: {printable(title, 200)}", f"{size}; {printable(inputs, 300)}.", sections))


def tree_html(tree: Tree) -> str:
    """Return HTML that shows the modules of a model with their stored dtypes and bytes."""
    return as_fragment(Report("Tree", repr(tree), (tree_section(tree, make_plan(tree, Recipe())),)))


def drift_html(report: DriftReport) -> str:
    """Return HTML that shows the metrics of a drift measurement, and the modules that drift most."""
    memory, tiles = report.memory, [verdict_tile(report)]
    if memory.stored_bytes is not None and memory.planned_bytes is not None:
        caches = ""
        if memory.cache_stored_bytes is not None and memory.cache_planned_bytes is not None:
            caches = cache_change_text(memory.cache_stored_bytes, memory.cache_planned_bytes, memory.cache_context or 0)
        tiles.insert(0, size_tile(memory.stored_bytes, memory.planned_bytes, caches))
    sections = [drift_section(report), *group_sections(report), *picture_sections(report)]
    if worst := worst_modules(report.modules, report.output)[:_ROWS]:
        sections.append(Section("Worst modules", (worst_table(worst),)))
    title = f"Drift: {printable(report.model, 200)}"
    rules = ", ".join(report.rules) or "none: as stored"
    words = f"Rules: {printable(rules, 1000)}. {printable(report.inputs_run, 300)}."
    return as_fragment(Report(title, words, tuple(sections), tuple(tiles)))


def scan_html(report: ScanReport) -> str:
    """Return HTML that shows a scan: the sum of the scores in each dtype, and the weights with the highest scores."""
    most = sorted(report.weights, key=lambda weight: -weight.score)[:_ROWS]
    known = any(each.rounding_gain is not None for each in most)
    rows = tuple(
        (
            Identifier(printable(each.name, 200)), each.dtype, human_bytes(each.bytes), with_error(each.score, each.error),
            *(["" if each.rounding_gain is None else less_error(each.rounding_gain)] if known else []),
        )
        for each in most
    )  # fmt: skip
    heads = ("weight", "dtype", "bytes", "score", *(["rounding"] if known else []))
    totals = tuple((dtypes.short_name(name), f"{total:.4e}") for total, name in report.totals())
    sections = (
        Section(totals_heading(report).capitalize(), (Table(("dtype", "sum of the scores"), totals, 1),)),
        Section("What matters most", (Table(heads, rows, 2),)),
    )
    title = f"Scan: {printable(report.model, 200)}"
    return as_fragment(Report(title, f"Scores in {report.unit}; {printable(report.inputs, 300)}.", sections))


def drift_repr(report: DriftReport) -> str:
    """Return the `repr` of a drift report: its main metrics in five lines."""
    output, memory = report.output, report.memory
    figures = [f"{cell.label} {cell.text}" for cell in cells("repr", output, report.sequences)]
    rules = ", ".join(report.rules) or "none: as stored"
    return (
        f"DriftReport: {printable(report.model, 100)} on {report.device} against {report.reference}\n"
        f"  rules   {printable(rules, 300)}\n"
        f"  drift   {', '.join(figures)} ({meaning(output, None, report.modules)})\n"
        f"  memory  stored {human_bytes(memory.stored_bytes or 0)} → planned {human_bytes(memory.planned_bytes or 0)}\n"
        f"  inputs  {printable(report.inputs_run, 300)}"
    )
