"""The window with the details of a module or tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dtype_engine.core import dtypes
from dtype_engine.core.draft_heads import NOT_RUN
from dtype_engine.core.roundings import ROUNDINGS
from dtype_engine.core.text import printable
from dtype_engine.core.tree import Module, TensorInfo, Totals
from dtype_engine.core.units import human_bytes, percent, plural
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
from dtype_tui.state.node_rules import effects_on, touched_names
from dtype_tui.widgets.tree_rows import worst_drift

if TYPE_CHECKING:
    from dtype_engine.results.drift import DriftReport


Row = tuple[str, str]
"""A row of the window: (label, text)."""


def details_screen(experiment: Experiment, node: str) -> Overlay:
    """Return a window with everything that is known about a node: a module, a tensor, or a fold of modules that are alike."""
    modules = modules_at(experiment.tree, node)
    tensor = experiment.tree.canonical(node) if not modules else None
    rows = [("name", printable(node, 2000) or "the whole model")]
    if cache := experiment.served.caches.get(node):
        size = f"{plural(experiment.served.batch, 'sequence')} of {experiment.tokens:,} tokens"
        rows += [
            ("class", "none: tensors of the KV cache"),
            ("planned", f"{_bytes_by_dtype(experiment.cache_totals(cache))}, for {size}"),
        ]
    elif modules:
        rows += [*_module_rows(experiment, node, modules), *_module_drift_rows(experiment, node, modules)]
    if tensor is not None:
        rows += _tensor_rows(experiment, tensor)
    grid = PlainTable.labelled()
    for row in (*rows, *_rule_rows(experiment, node)):
        grid.add_row(*row)
    return Overlay(printable(node_label(experiment.tree, node), 60) or experiment.model.title, grid)


def _module_rows(experiment: Experiment, node: str, modules: tuple[Module, ...]) -> Iterator[Row]:
    """Yield rows with everything but the drift of a module or of folded modules."""
    stored = experiment.tree.totals().of(modules)
    planned = experiment.totals.of(modules)
    if len(modules) > 1:
        yield "folded", f"{len(modules)} neighbors that are alike; all figures are those of all of them"
    yield "class", modules[0].class_name or _no_class(experiment)
    exact, short = f"{planned.parameters:,}", planned.parameters_text
    yield "parameters", short if planned.unknown or short == exact else f"{exact} ({short})"
    if planned.buffers:
        yield "buffers", f"{planned.buffers:,} elements, not counted as parameters"
    if tied := dict.fromkeys(other.name for each in modules for other in experiment.tree.tied_into(each.name)):
        names = ", ".join(printable(name, 500) for name in tied)
        yield "tied", f"{names}: counted there, not here"
    yield "stored", _bytes_by_dtype(stored)
    yield "planned", _bytes_by_dtype(planned)
    if not node:
        for line in experiment.model.provenance:
            yield "provenance", line
        for kind, below in totals_by_kind(experiment.tree, experiment.plan.dtypes).items():
            share = percent(below.total_bytes / planned.total_bytes if planned.total_bytes else 0.0)
            yield kind, f"{_bytes_by_dtype(below)}, {share} % of the model"
    if modules[0].keep_in_fp32:
        yield "keep float32", modules[0].keep_in_fp32
    if node and experiment.tree.draft.holds(node):
        yield "draft head", NOT_RUN


def _module_drift_rows(experiment: Experiment, node: str, modules: tuple[Module, ...]) -> Iterator[Row]:
    drift = worst_drift(experiment.results.modules, modules)
    if not node:
        yield from (*drift_rows(experiment), *memory_rows(experiment)[2:])
    elif drift is not None:
        words = f"SQNR {drift.sqnr_text}, max |Δ| {drift.max_abs:.4e}, non-finite {drift.nonfinite_text}"
        worst = f"; the worst is {printable(drift.name, 500)}" if drift.name != node else ""
        yield "drift", f"{words}{_over(experiment.results.report)}{worst}"


def _tensor_rows(experiment: Experiment, tensor: TensorInfo) -> Iterator[Row]:
    planned = experiment.plan.dtypes[tensor.name]
    if tensor.aliases:
        yield "tied", ", ".join(printable(name, 500) for name in tensor.names) + ": one tensor, one dtype"
    yield "kind", tensor.kind
    if experiment.tree.draft.holds(tensor.name):
        yield "draft head", NOT_RUN
    if kept := experiment.tree.kept_in_fp32.get(tensor.name):
        yield "keep float32", kept
    yield "shape", " × ".join(map(str, tensor.shape)) or "scalar"
    yield "elements", f"{tensor.numel:,}"
    yield "stored", f"{tensor.dtype}, {human_bytes(tensor.nbytes)}"
    yield "planned", f"{planned}, {human_bytes(tensor_bytes(tensor, planned))}"
    row = dtypes.BY_NAME.get(planned)
    if row is not None and row.kind == "float":
        yield "range", f"largest {row.max:.4g}, smallest normal {row.tiny:.4g}, {row.mantissa} mantissa bits"
    if words := dtypes.block_words(planned):
        yield "blocks", words + ("; the last ones are shorter" if dtypes.padded(tensor.shape, planned) else "")
    if row is not None and row.rounding:
        yield "rounding", f"{row.rounding}: {ROUNDINGS[row.rounding].words}"
    if words := fused_with(tensor.name, experiment.plan.dtypes):
        yield "fused", words
    if not tensor.castable:
        yield "never cast", tensor.why_not_cast
    for loss in experiment.results.losses.values or ():
        if loss.tensor == tensor.name:
            before = f"; {loss.nonfinite:,} were not finite before" if loss.nonfinite else ""
            rounding = ", which is rounding" if loss.is_rounding else ""
            yield "values lost", f"{loss_words(loss)}{rounding}{before}"


def _rule_rows(experiment: Experiment, node: str) -> Iterator[Row]:
    effects = effects_on(experiment.tree, experiment.plan, node)
    every = plural(len(touched_names(experiment.tree, node)), "tensor")
    for effect in effects:
        counts = f"matches {effect.matches:,} of {every}, decides {effect.decides:,}"
        yield f"rule {effect.index + 1}", f"{printable(str(effect.rule), 500)}  {counts}"
    if not effects:
        yield "rules", "none: as stored"


def _over(report: DriftReport | None) -> str:
    """Return how many sequences the modules' drift covers, such as `, over 2 of 6 sequences`, or "" if it covers all."""
    extent = modules_extent_text(report) if report is not None else ""
    return f", over {extent}" if extent else ""


def _bytes_by_dtype(totals: Totals) -> str:
    of = " of the bytes" if len(totals.mix()) > 1 else ""
    return f"{human_bytes(totals.total_bytes)}  {mix_text(totals)}{of}" if totals.mix() else human_bytes(0)


def _no_class(experiment: Experiment) -> str:
    if experiment.model.no_forward is None and not experiment.model.live:
        return "known when the model is loaded"
    return "none: it only holds others" if experiment.tree.has_classes else "unknown: no file names the architecture"
