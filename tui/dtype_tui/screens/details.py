"""The window with the details of a module or tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtype_engine.core import dtypes
from dtype_engine.core.text import printable
from dtype_engine.core.tree import Totals
from dtype_engine.core.units import decibels, human_bytes, percent, plural
from dtype_engine.recipe import tensor_bytes
from dtype_engine.recipe.fused_words import fused_with
from dtype_engine.reports.layer_kinds import totals_by_kind
from dtype_engine.reports.text import mix_text
from dtype_engine.reports.text_drift import modules_extent_text
from dtype_engine.reports.text_losses import loss_words
from dtype_tui.rendering.plain_table import PlainTable
from dtype_tui.screens.overlay import Overlay
from dtype_tui.state.experiment import Experiment
from dtype_tui.state.folds import modules_at, node_label
from dtype_tui.state.full_rows import drift_rows, memory_rows
from dtype_tui.state.node_rules import effects_on
from dtype_tui.widgets.tree_rows import worst_drift

if TYPE_CHECKING:
    from dtype_engine.results.drift import DriftReport


def details_screen(experiment: Experiment, node: str) -> Overlay:
    """Return a window with everything that is known about a node: a module, a tensor, or a fold of modules that are alike."""
    grid = PlainTable.labelled()
    grid.add_row("name", printable(node, 2000) or "the whole model")
    modules = modules_at(experiment.tree, node)
    module = modules[0] if modules else None
    if cache := experiment.caches.get(node):
        grid.add_row("class", "none: tensors of the KV cache")
        size = f"{plural(experiment.batch, 'sequence')} of {experiment.tokens:,} tokens"
        grid.add_row("planned", f"{_bytes_by_dtype(experiment.cache_totals(cache))}, for {size}")
    elif module is not None:
        stored = experiment.tree.totals().of(modules)
        planned = experiment.totals.of(modules)
        if len(modules) > 1:
            grid.add_row("folded", f"{len(modules)} neighbors that are alike; all figures are those of all of them")
        grid.add_row("class", module.class_name or _no_class(experiment))
        exact, short = f"{planned.parameters:,}", planned.parameters_text
        grid.add_row("parameters", short if planned.unknown or short == exact else f"{exact} ({short})")
        if planned.buffers:
            grid.add_row("buffers", f"{planned.buffers:,} elements, not counted as parameters")
        if tied := dict.fromkeys(other.name for each in modules for other in experiment.tree.tied_into(each.name)):
            names = ", ".join(printable(name, 500) for name in tied)
            grid.add_row("tied", f"{names}: counted there, not here")
        grid.add_row("stored", f"{_bytes_by_dtype(stored)}")
        grid.add_row("planned", f"{_bytes_by_dtype(planned)}")
        if not node:
            for line in experiment.model.provenance:
                grid.add_row("provenance", line)
            for kind, below in totals_by_kind(experiment.tree, experiment.plan.dtypes).items():
                share = percent(below.total_bytes / planned.total_bytes if planned.total_bytes else 0.0)
                grid.add_row(kind, f"{_bytes_by_dtype(below)}, {share} % of the model")
        if module.keep_in_fp32:
            grid.add_row("keep float32", module.keep_in_fp32)
        drift = worst_drift(experiment.results.modules, modules)
        if not node:
            for label, words in (*drift_rows(experiment), *memory_rows(experiment)[2:]):
                grid.add_row(label, words)
        elif drift is not None:
            grid.add_row(
                "drift",
                f"SQNR {decibels(drift.sqnr_db)}, max |Δ| {drift.max_abs:.4e}, non-finite {drift.nonfinite:,}"
                + _over(experiment.results.report)
                + (f"; the worst is {printable(drift.name, 500)}" if len(modules) > 1 else ""),
            )
    tensor = experiment.tree.canonical(node) if module is None else None
    if tensor is not None:
        planned_dtype = experiment.plan.dtypes[tensor.name]
        if tensor.aliases:
            grid.add_row("tied", ", ".join(printable(name, 500) for name in tensor.names) + ": one tensor, one dtype")
        grid.add_row("kind", tensor.kind)
        if kept := experiment.tree.kept_in_fp32.get(tensor.name):
            grid.add_row("keep float32", kept)
        grid.add_row("shape", " × ".join(map(str, tensor.shape)) or "scalar")
        grid.add_row("elements", f"{tensor.numel:,}")
        grid.add_row("stored", f"{tensor.dtype}, {human_bytes(tensor.nbytes)}")
        grid.add_row(
            "planned", f"{planned_dtype}, {human_bytes(tensor_bytes(tensor, experiment.plan.dtypes[tensor.name]))}"
        )
        row = dtypes.BY_NAME.get(planned_dtype)
        if row is not None and row.kind == "float":
            grid.add_row(
                "range", f"largest {row.max:.4g}, smallest normal {row.tiny:.4g}, {row.mantissa} mantissa bits"
            )
        if words := dtypes.block_words(planned_dtype):
            shorter = "; the last ones are shorter" if dtypes.padded(tensor.shape, planned_dtype) else ""
            grid.add_row("blocks", words + shorter)
        if words := fused_with(tensor.name, experiment.plan.dtypes):
            grid.add_row("fused", words)
        if not tensor.castable:
            grid.add_row("never cast", tensor.why_not_cast)
        for loss in experiment.results.losses.values or ():
            if loss.tensor == tensor.name:
                before = f"; {loss.nonfinite:,} were not finite before" if loss.nonfinite else ""
                rounding = ", which is rounding" if loss.is_rounding else ""
                grid.add_row("values lost", f"{loss_words(loss)}{rounding}{before}")
    effects = effects_on(experiment.tree, experiment.plan, node)
    for effect in effects:
        won, taken = effect.decides, effect.matches
        verdict = (
            "decides" if won == taken else "loses to a later rule" if won == 0 else f"decides {won} of {taken} tensors"
        )
        grid.add_row(f"rule {effect.index + 1}", f"{printable(str(effect.rule), 500)}  {verdict}")
    if not effects:
        grid.add_row("rules", "none: as stored")
    return Overlay(printable(node_label(experiment.tree, node), 60) or experiment.model.title, grid)


def _over(report: DriftReport | None) -> str:
    """Return how many sequences the modules' drift covers, such as `, over 2 of 6 sequences`. Returns "" if it covers all of them,
    or if `report` is None.
    """
    extent = modules_extent_text(report) if report is not None else ""
    return f", over {extent}" if extent else ""


def _bytes_by_dtype(totals: Totals) -> str:
    of = " of the bytes" if len(totals.mix()) > 1 else ""
    return f"{human_bytes(totals.total_bytes)}  {mix_text(totals)}{of}" if totals.mix() else human_bytes(0)


def _no_class(experiment: Experiment) -> str:
    if experiment.model.no_forward is None and not experiment.model.live:
        return "known when the model is loaded"
    return "none: it only holds others" if experiment.tree.has_classes else "unknown: no file names the architecture"
