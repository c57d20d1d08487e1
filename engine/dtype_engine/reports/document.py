"""Builds a report about a plan (the dtypes of all tensors under a recipe) and one measurement of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from dtype_engine.core import dtypes
from dtype_engine.core.options import RunSettings
from dtype_engine.core.text import printable
from dtype_engine.core.tree import Module, Totals, Tree, is_number
from dtype_engine.core.units import human_bytes, human_count, seconds_text
from dtype_engine.recipe import Plan
from dtype_engine.recipe.serving_memory import cache_change, default_context
from dtype_engine.reports.blocks import BarChart, Identifier, Pictures, Report, Section, StackedBars, Table
from dtype_engine.reports.overview import plain_sentence, size_tile, third_tile, verdict_tile
from dtype_engine.reports.text import WEIGHTS_ONLY, cache_change_text, mix_text
from dtype_engine.reports.text_drift import (
    first_sentence,
    modules_extent_text,
    reference_words,
    remedy_result,
    value_sentence,
)
from dtype_engine.reports.text_groups import HEADINGS as GROUP_HEADINGS
from dtype_engine.reports.text_groups import group_rows
from dtype_engine.reports.text_losses import HELP
from dtype_engine.results.attribution import NonFiniteDiagnosis
from dtype_engine.results.drift import DriftReport, ModuleDrift, worst_modules
from dtype_engine.results.figures import cells
from dtype_engine.results.groups import GROUPINGS, group_label
from dtype_engine.results.losses import ValueLoss, severe
from dtype_engine.results.meaning import HELP as MEANING_HELP
from dtype_engine.results.meaning import meaning
from dtype_engine.results.runs import SpeedReport

MOST_MODULES = 2000
_SUMMARY_ROWS = 40
_WORST = 12
_LOST = "Values lost in the casts"
_FIGURES = ("SQNR", "max |Δ|", "non-finite")


@dataclass(frozen=True, slots=True)
class Measured:
    """The results of measuring a model under a plan."""

    drift: DriftReport | None = None
    no_drift: str = ""
    """Why `drift` is None, or ""."""
    lost: Sequence[ValueLoss] | None = None
    """If `drift` is None: the weights of which the cast makes values infinite or zero, or None if these weights are unknown."""
    nonfinite: NonFiniteDiagnosis | None = None
    """The diagnosis if values in the measurement are not finite, otherwise None."""
    speed: SpeedReport | None = None


def build_report(
    tree: Tree,
    plan: Plan,
    title: str,
    settings: RunSettings,
    measured: Measured,
    versions: Mapping[str, str],
    provenance: Sequence[str] = (),
) -> Report:
    """Return the report of a plan: first the answer in tiles and one sentence, then sections, the most important first.

    settings: how the candidate was run. versions: by name. provenance: lines that say how the checkpoint was quantized.
    """
    drift, no_drift, nonfinite, speed = measured.drift, measured.no_drift, measured.nonfinite, measured.speed
    losses = drift.lost if drift is not None and drift.lost is not None else measured.lost
    sections = [
        *(picture_sections(drift) if drift is not None else []),
        *(_depth(tree, drift) if drift is not None else []),
        rules_section(tree, plan),
        *([_worst(tree, drift)] if drift is not None else []),
        _memory(tree, plan, drift),
        *([_nonfinite_section(nonfinite)] if nonfinite is not None else []),
        *_lost(plan, losses),
        drift_section(drift, no_drift),
        *(group_sections(drift) if drift is not None else []),
        tree_section(tree, plan),
        _modules(tree, plan, drift),
        _made_with(settings, drift, versions, provenance, speed.notices if speed is not None else ()),
    ]
    caches = _cache_text(tree, plan) if plan.caches else ""
    tiles = (
        size_tile(plan.stored_bytes, plan.planned_bytes, caches),
        verdict_tile(drift, no_drift, nonfinite),
        third_tile(tree.totals(plan.dtypes)[""], speed),
    )
    sentence = plain_sentence(title, plan, drift, no_drift, losses, caches)
    return Report(printable(title, 200), sentence, tuple(sections), tiles)


def _cache_text(tree: Tree, plan: Plan) -> str:
    context = default_context(tree)
    return cache_change_text(*cache_change(tree, plan, context), context)


def _lost(plan: Plan, losses: Sequence[ValueLoss] | None) -> list[Section]:
    """Return the section about values that casts made infinite or zero, if a rule casts anything. losses: None if not counted."""
    if not any(rule.dtype != dtypes.STORED for rule in plan.recipe.rules):
        return []
    if losses is None:
        return [Section(_LOST, ("Not known: the values were not read.",))]
    if not losses:
        return [Section(_LOST, ("None: no value became infinite, and only rounding made values zero.",))]
    ordered = [*severe(losses), *(loss for loss in losses if loss.is_rounding)]
    rows = tuple(
        (
            Identifier(printable(loss.tensor, 300)), loss.dtype, f"{loss.elements:,}", f"{loss.overflowed:,}",
            f"{loss.vanished:,}", f"{loss.saturated:,}", "rounding" if loss.is_rounding else "",
        )
        for loss in ordered[:MOST_MODULES]
    )  # fmt: skip
    head = ("tensor", "cast to", "values", "became infinite", "became zero", "clipped", "")
    left_out = len(ordered) - len(rows)
    more = (f"{left_out:,} more tensors are left out here.",) if left_out else ()
    return [Section(_LOST, (HELP, Table(head, rows, 2), *more))]


def rules_section(tree: Tree, plan: Plan) -> Section:
    """Return the section about the rules: how many tensors each rule matches, how many of these get the rule's dtype, and their
    bytes.
    """
    if not plan.recipe.rules:
        return Section("Rules", ("None: every tensor as stored.",))
    rows = tuple(
        (
            str(effect.index + 1), Identifier(printable(effect.rule.pattern, 500)), effect.rule.dtype,
            f"{effect.matches:,}", f"{effect.decides:,}",
            *(("KV cache", "") if effect.caches and not effect.tensors
              else (human_bytes(effect.bytes_before), human_bytes(effect.bytes_after))),
        )
        for effect in plan.effects(tree)
    )  # fmt: skip
    head = ("", "pattern", "dtype", "matches", "decides", "stored", "in this dtype")
    return Section("Rules", ("The last rule that matches a tensor decides.", Table(head, rows, 3)))


def _memory(tree: Tree, plan: Plan, drift: DriftReport | None) -> Section:
    stored, planned = tree.totals()[""], tree.totals(plan.dtypes)[""]
    names = [name for name, _ in stored.mix()]
    names += [name for name, _ in planned.mix() if name not in names]
    rows = []
    for name in (*names, "all"):
        row = [name]
        for totals in (stored, planned):
            elements, nbytes = totals.elements.get(name, 0), totals.nbytes.get(name, 0)
            if name == "all":
                elements, nbytes = sum(totals.elements.values()), totals.total_bytes
            row += [human_count(elements), human_bytes(nbytes)]
        rows.append(tuple(row))
    head = ("dtype", "elements stored", "bytes stored", "elements planned", "bytes planned")
    parts: list[str | Table | StackedBars | BarChart | Pictures] = [
        StackedBars("Bytes by dtype", (("stored", _pieces(stored)), ("planned", _pieces(planned)))),
        Table(head, tuple(rows), 1),
        "Parameters and persistent buffers, tied weights once; planned bytes are exact and include scales.",
    ]
    if tree.kv_cache.tensors:
        parts.append(f"KV cache: {_cache_text(tree, plan)}.")
    if drift is not None:
        held = drift.memory
        live = [
            ("resident: all tensors of the live model", held.resident_bytes),
            ("process: resident set", held.rss_bytes),
            ("process: anonymous memory", held.anonymous_bytes),
            ("process: mapped from the checkpoint", held.mapped_bytes),
            ("process: peak while measuring", held.peak_rss_bytes),
            ("device: allocated", held.device_allocated_bytes),
            ("device: peak", held.device_peak_bytes),
        ]
        sizes = tuple((what, human_bytes(size)) for what, size in live if size is not None)
        if sizes:
            parts.append(Table(("while it was measured", "bytes"), sizes, 1))
    return Section("Memory", tuple(parts))


def _pieces(totals: Totals) -> tuple[tuple[str, float, str], ...]:
    sizes = [(dtypes.short_name(name), totals.nbytes[name]) for name, _ in totals.mix()]
    return tuple((name, float(size), f"{name} {human_bytes(size)}") for name, size in sizes if size)


def drift_section(drift: DriftReport | None, no_drift: str = "") -> Section:
    """Return the section with the metrics of a measurement or, if `drift` is None, with the reason `no_drift`."""
    if drift is None:
        return Section("Drift", (f"Not measured: {printable(no_drift, 1000) or 'no forward pass was run'}.",))
    output = drift.output
    said = meaning(output, None, drift.modules)
    rows = [
        ("meaning", said.word, said.why),
        *(
            (cell.label, cell.text, cell.figure.what.format(positions=output.positions))
            for cell in cells("report", output, drift.sequences)
        ),
    ]
    if drift.draft is not None:
        rows.append(("draft head, acceptance", drift.draft.short, f"mean of Σ min(p, q), {drift.draft.what}"))
    for change in drift.metrics:
        how = "resamples of the examples" if change.resampled else "the examples"
        what = f"{change.changed:,} of {change.examples:,} examples changed, ± paired standard error over {how}"
        rows.append((printable(change.name), change.short, what))
    name = f"{printable(drift.output_name)} ({output.elements:,} elements)"
    plain = f"{drift.reference} arithmetic on the weights as stored"
    words = f"Of {name}, against {plain if drift.reference in dtypes.BY_NAME else reference_words(drift.reference)}."
    return Section("Drift", (words, Table(("figure", "value", "what it is"), tuple(rows)), MEANING_HELP))


def group_sections(drift: DriftReport) -> list[Section]:
    """Return a section for each way to group the positions of the output that was measured, with a chart if the groups are places
    in the sequence.
    """
    sections = []
    for grouping in GROUPINGS.values():
        if found := grouping.of(drift.output.groups):
            table = Table((grouping.name, *GROUP_HEADINGS), group_rows(drift.output, grouping), 1)
            points = tuple(
                (group_label(name), group.kl_mean if math.isfinite(group.kl_mean) else None)
                for name, group in found.items()
            )
            chart = BarChart(f"Mean KL by {grouping.title}", points, "nats", "highest", ".2e")
            drawn = (chart,) if grouping.has_chart and len(points) > 1 and any(value for _, value in points) else ()
            sections.append(Section(f"Drift by {grouping.title}", (grouping.what, table, *drawn)))
    return sections


def _nonfinite_section(diagnosis: NonFiniteDiagnosis) -> Section:
    rows = [("where", first_sentence(diagnosis)), ("why", value_sentence(diagnosis))]
    if diagnosis.remedy:
        rows += [("remedy", Identifier(rule)) for rule in map(printable, diagnosis.remedy)]
        rows.append(("tried", remedy_result(diagnosis)))
    else:
        rows.append(("no remedy", printable(diagnosis.reason, 400)))
    return Section("Where values stop being finite", (Table(("", ""), tuple(row for row in rows if row[1])),))


def tree_section(tree: Tree, plan: Plan) -> Section:
    """Return the section about modules with weights: the root and as many levels below the root as fit in about forty rows."""
    stored, planned = tree.totals(), tree.totals(plan.dtypes)
    rows = []
    for name, modules in _table_rows(tree):
        class_name = modules[0].class_name or ""
        before, after = (Totals.sum_of(totals[module.name] for module in modules) for totals in (stored, planned))
        if name and not _has_weights(before):
            continue
        rows.append(
            (
                Identifier(printable(name, 200)) if name else "the whole model", class_name, after.parameters_text,
                human_bytes(before.total_bytes), human_bytes(after.total_bytes), mix_text(after) if after.nbytes else "-",
            )
        )  # fmt: skip
    head = ("module", "class", "parameters", "stored", "planned", "planned dtypes by bytes")
    return Section("Model", (Table(head, tuple(rows), 2),))


def _table_rows(tree: Tree) -> list[tuple[str, list[Module]]]:
    """Return (name, modules) for each row of the table of modules. Numbered modules of one class, such as layers, share a row."""
    left = _SUMMARY_ROWS
    level: list[tuple[str, list[Module]]] = [("", [tree.root])]
    lines: list[tuple[str, list[Module]]] = []
    while level and left >= len(level):
        lines += level
        left -= len(level)
        level = [entry for name, modules in level for entry in _child_rows(name, modules)]
    return sorted(lines, key=lambda line: tree.modules[line[1][0].name].first)


def _child_rows(name: str, modules: list[Module]) -> list[tuple[str, list[Module]]]:
    """Return the rows one level below a row. For example, below `model.layers`, six layers of one class share the row
    `model.layers.{0..5}`. Below that row, their six MLPs share the row `model.layers.{0..5}.mlp`.
    """
    prefix = f"{name}." if name else ""
    labels = list(modules[0].children)
    if len(labels) > 1 and all(is_number(label) for label in labels):
        together = [child for module in modules for child in module.children.values()]
        if len({child.class_name for child in together}) == 1:
            return [(f"{prefix}{{{labels[0]}..{labels[-1]}}}", together)]
    return [
        (prefix + label, [module.children[label] for module in modules if label in module.children]) for label in labels
    ]


def _leaves(tree: Tree, drift: DriftReport) -> list[ModuleDrift]:
    """Return the drift of each module without children, in the order of the tree. Modules that the tree does not have come last."""
    readings = {reading.name: reading for reading in drift.modules}
    ordered = {module.name: readings[module.name] for module in tree.walk() if module.name in readings}
    return [
        reading
        for name, reading in (ordered | readings).items()
        if name not in tree.modules or not tree.modules[name].children
    ]


def picture_sections(drift: DriftReport) -> list[Section]:
    """Return a list with one section, which shows the pictures that both models make, or [] if they make none."""
    pairs = tuple(
        Pictures(f"Input {number}", (("reference", pair.reference), ("candidate", pair.candidate)))
        for number, pair in enumerate(drift.pictures, 1)
    )
    return [Section("Pictures", pairs)] if pairs else []


def _depth(tree: Tree, drift: DriftReport) -> list[Section]:
    leaves, totals = _leaves(tree, drift), tree.totals()
    worst = {reading.name for reading in worst_modules(leaves)[:_WORST]}
    points = tuple(
        (printable(reading.name, 200), None if math.isinf(reading.sqnr_db or 0.0) else reading.sqnr_db)
        for reading in leaves
        if reading.name in worst or (reading.name in tree.modules and _has_weights(totals[reading.name]))
    )
    if all(value is None for _, value in points):
        return []
    chart = BarChart("SQNR of the outputs of innermost modules, in the order of the tree", points, "dB")
    return [Section("Drift over depth", (chart,))]


def _worst(tree: Tree, drift: DriftReport) -> Section:
    if not drift.modules_sequences:
        return Section("Worst modules", ("Not known: outputs of modules were not compared.",))
    worst = worst_modules(_leaves(tree, drift), drift.output)[:_WORST]
    if not worst:
        return Section("Worst modules", ("None: no module's output differs from the reference.",))
    extent = modules_extent_text(drift)
    compared = f"Outputs of modules were compared in {extent}. --modules exact compares all."
    return Section("Worst modules", (*((compared,) if extent else ()), worst_table(worst)))


def _has_weights(totals: Totals) -> bool:
    return bool(totals.nbytes or totals.tied or totals.unknown)


def worst_table(worst: Iterable[ModuleDrift]) -> Table:
    rows = tuple((Identifier(printable(reading.name, 200)), *_figures(reading)) for reading in worst)
    return Table(("the worst", *_FIGURES), rows, 1)


def _figures(reading: ModuleDrift) -> tuple[str, ...]:
    return reading.sqnr_text, f"{reading.max_abs:.3e}", reading.nonfinite_text


def _modules(tree: Tree, plan: Plan, drift: DriftReport | None) -> Section:
    stored, planned = tree.totals(), tree.totals(plan.dtypes)
    readings = {reading.name: reading for reading in drift.modules} if drift is not None else {}
    rows = []
    modules = [module for module in tree.walk() if module.name and _has_weights(stored[module.name])]
    for module in modules[:MOST_MODULES]:
        before, after = stored[module.name], planned[module.name]
        reading = readings.get(module.name)
        figures = _figures(reading) if reading else ("",) * len(_FIGURES)
        rows.append(
            (
                Identifier(printable(module.name, 300)), module.class_name or "", mix_text(before) if before.nbytes else "-",
                mix_text(after) if after.nbytes else "-", after.parameters_text, human_bytes(after.total_bytes),
                *(figures if drift is not None else ()),
            )
        )  # fmt: skip
    head: tuple[str, ...] = ("module", "class", "stored", "planned", "parameters", "bytes planned")
    head += _FIGURES if drift is not None else ()
    left_out = len(modules) - len(rows)
    more = (f"{left_out:,} more modules are left out here.",) if left_out > 0 else ()
    return Section("Every module with weights", (Table(head, tuple(rows), 4), *more))


def _made_with(
    settings: RunSettings,
    drift: DriftReport | None,
    versions: Mapping[str, str],
    provenance: Sequence[str],
    of_speed: Sequence[str],
) -> Section:
    rows = [("when", f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC")]
    rows += [("checkpoint", printable(line, 1000)) for line in provenance]
    if drift is not None:
        rows += [
            ("inputs", printable(drift.inputs_run, 500)),
            ("reference", drift.reference),
            ("settings", printable(drift.settings, 500)),
            *([("quantized", WEIGHTS_ONLY)] if drift.weights_only else []),
            ("device", drift.device),
        ]
        if drift.seconds.reference is not None and drift.seconds.candidate is not None:
            partly = " (only what changed was run)" if drift.seconds.reused else ""
            reference, candidate = seconds_text(drift.seconds.reference), seconds_text(drift.seconds.candidate)
            rows.append(("forward passes", f"reference {reference}, candidate {candidate}{partly}"))
    else:
        rows.append(("settings", printable(str(settings), 500)))
    rows += [(name, printable(version)) for name, version in versions.items()]
    notices = (*(drift.notices if drift is not None else ()), *of_speed)
    notes = (f"Note: {printable(notice, 1000)}" for notice in notices)
    return Section("How it was made", (Table(("", ""), tuple(rows)), *notes))
