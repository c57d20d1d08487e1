"""Makes rows (label, text) of all that is known about drift and memory: for the model's details, and for a pane shown alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dtype_engine.core.options import RunSettings
from dtype_engine.core.text import printable
from dtype_engine.core.units import change_text, human_bytes, plural
from dtype_engine.recipe.serving_memory import decoding
from dtype_engine.reports.text_drift import WITHIN_KERNELS, extent_text, floor_text, modules_extent_text
from dtype_engine.reports.text_groups import group_words
from dtype_engine.reports.text_memory import budget_words, cache_words, size_words
from dtype_engine.results.figures import About, Figure, cells
from dtype_engine.results.meaning import meaning

if TYPE_CHECKING:
    from dtype_engine.results.drift import DriftReport, Extent, OutputDrift
    from dtype_tui.state.experiment import Experiment
    from dtype_tui.state.measurement_log import MeasuredRecipe

Rows = list[tuple[str, str]]


def drift_rows(experiment: Experiment) -> Rows:
    """Return rows (label, text) about the drift of the model's output. Empty if nothing has been measured."""
    report, partial = experiment.results.report, experiment.results.partial_drift
    if report is not None:
        rows = [("over", extent_text(report.sequences)), ("reference", printable(experiment.model.reference, 300))]
        rows.append(("meaning", str(meaning(report.output, experiment.floor, report.modules))))
        if experiment.floor is not None and experiment.floor.ways:
            rows.append(("floor", floor_text(experiment.floor)))
        if (kernels := experiment.results.kernels) is not None and kernels.ways:
            rows.append(("kernels", f"{floor_text(kernels)} by {' and '.join(kernels.ways)}"))
            rows += [("", WITHIN_KERNELS)] if kernels.explains(report.output) else []
        return [*rows, *_figures(experiment, report.output, report.sequences), *_run(report)]
    if partial is not None:
        return [("so far", extent_text(partial.extent)), *_figures(experiment, partial.output, partial.extent)]
    return []


def _figures(experiment: Experiment, output: OutputDrift, extent: Extent) -> Iterator[tuple[str, str]]:
    """Yield rows (label, text) with the output's metrics, beside those of the baseline. extent: how many inputs were run."""
    base = experiment.baseline
    if base is not None:
        yield "P", f"{printable(str(base.recipe), 200)}: {meaning(base.output).word}"

    def shown(about: About) -> Rows:
        found = cells("details", output, extent, about)
        return [(cell.label, cell.text + _baseline(base, cell.figure)) for cell in found]

    yield from shown("values")
    if not output.is_finite:
        yield "not finite", output.nonfinite_text
    yield from shown("distribution")
    yield from group_words(output)
    if guess := experiment.predicted():
        yield "scan predicts", guess
    yield from shown("predictions")
    report = experiment.results.report
    if report is not None and report.draft is not None:
        yield "draft head", str(report.draft)
    for change in report.metrics if report is not None else ():
        pinned = None if base is None else base.metric(change.name)
        yield printable(change.name, 60), f"{change}" + (f"  P {pinned.candidate:.4g}" if pinned is not None else "")


def _baseline(base: MeasuredRecipe | None, figure: Figure) -> str:
    value = figure.of(base.output) if base is not None else None
    return "" if figure.baseline is None or value is None else f"  P {figure.baseline(value)}"


def _run(report: DriftReport) -> Iterator[tuple[str, str]]:
    if report.sequences.left_out:
        yield "padding", f"{plural(report.sequences.left_out, 'position')} left out"
    if report.settings != str(RunSettings()):
        yield "settings", report.settings
    if report.weights_only:
        yield "quantized", "weights only"
    if extent := modules_extent_text(report):
        yield "modules", extent
    yield "of", printable(f"{report.output_name}, {report.inputs}", 200)
    if report.seconds.reference is not None and report.seconds.candidate is not None:
        partly = "the changed part: " if report.seconds.reused else ""
        yield "time", f"{partly}{report.seconds.candidate:.2f} s (reference {report.seconds.reference:.2f} s)"


def memory_rows(experiment: Experiment) -> Rows:
    """Return rows (label, text) with the bytes of the checkpoint and in memory. Empty while not all headers are read."""
    if experiment.model.partial:
        return []
    plan = experiment.plan
    change = change_text(plan.stored_bytes, plan.planned_bytes)
    rows = [
        ("stored", human_bytes(plan.stored_bytes)),
        ("planned", f"{human_bytes(plan.planned_bytes)}  {change}".rstrip()),
    ]
    if experiment.baseline is not None:
        rows.append(("P planned", human_bytes(experiment.baseline.planned_bytes)))
    return [*rows, *_serving(experiment), *_measured_memory(experiment)]


def _serving(experiment: Experiment) -> Iterator[tuple[str, str]]:
    memory = experiment.serving()
    if memory.kv_dtypes:
        yield "KV cache", f"{human_bytes(memory.kv_bytes)}  {cache_words(memory)}; {size_words(memory)}"
        if memory.activations is not None:
            yield "activations", f"{human_bytes(memory.activations.nbytes)} estimated, at the peak of a pass"
        yield "together", human_bytes(memory.total_bytes)
    reads = decoding(experiment.tree, experiment.plan, memory)
    if reads.active_bytes is not None:
        yield "active", f"{human_bytes(reads.active_bytes)} read for a token: {reads.what}"
    for line in (*budget_words(memory), *memory.notes):
        yield "serving", printable(line, 500)


def _measured_memory(experiment: Experiment) -> Iterator[tuple[str, str]]:
    memory = experiment.memory
    if memory is None:
        return
    if memory.read_bytes is not None:
        whole = human_bytes(experiment.plan.stored_bytes)
        yield "read", f"{human_bytes(memory.read_bytes)} by this job; a pass reads at most {whole}"
    elif memory.resident_bytes is not None:
        devices = ", ".join(f"{name} {human_bytes(size)}" for name, size in memory.resident_by_device if size)
        yield "resident", devices or human_bytes(memory.resident_bytes)
    most = f" of {human_bytes(memory.kept_budget_bytes)}" if memory.kept_budget_bytes is not None else ""
    sizes = (
        ("process", memory.rss_bytes, ""),
        ("peak", memory.peak_rss_bytes, ""),
        ("anonymous", memory.anonymous_bytes, ""),
        ("mapped", memory.mapped_bytes, " of the checkpoint"),
        ("cache", memory.kept_bytes, most),
        ("allocated", memory.device_allocated_bytes, " on the device"),
        ("reserved", memory.device_reserved_bytes, ""),
        ("device peak", memory.device_peak_bytes, ""),
    )
    yield from ((label, f"{human_bytes(size)}{words}") for label, size, words in sizes if size is not None)
