"""The Memory pane, one of the three side panes."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from dtype_engine.core import dtypes
from dtype_engine.core.units import change_text, human_bytes, percent
from dtype_engine.reports.layer_kinds import totals_by_kind
from dtype_engine.reports.text_memory import budget_words
from dtype_tui.rendering.cells import meter, short_bytes, stacked
from dtype_tui.rendering.palette import colour, heat
from dtype_tui.state.full_rows import memory_rows
from dtype_tui.widgets.panes.base import Pane
from dtype_tui.widgets.panes.drift import rows_table

if TYPE_CHECKING:
    from dtype_engine.results.memory import MemoryStats

_LABEL = len("resident ")
_MOST_BY_KIND = 5_000
"""The bytes are shown by kind of layer for at most this many tensors. For more, computing them would delay the response to a key.
"""


class MemoryPane(Pane):
    """Shows the planned bytes by dtype, and the bytes of the tensors in memory and of the process."""

    TITLE = "Memory"
    HELP = (
        "stored: the checkpoint's tensors. planned: the same under the recipe, including scales, with tied weights counted once; "
        "percentages are shares of these bytes, or the change from stored. "
        "KV cache: what the model keeps of earlier tokens, at the context that :context sets. "
        "together: the weights, this cache, and the activations of a pass over this context, which :activations estimates. "
        "resident: all tensors of the live model now, with a bar for each device that --max-memory limits. "
        "process: the resident set; anonymous is the process's private memory, mapped are pages of the checkpoint's files, which "
        "the system can reclaim. peak: of the process since the last measurement began. "
        "read: how much the running job has read from the disk, for a model that is larger than the memory. "
        "cache: outputs of modules that the next measurement reuses, and their limit (--keep); they are part of the process or, if "
        "the model is on a device, of the device."
    )

    def corner(self, activity: str) -> Text:
        """Return the change from the stored to the planned bytes, and the planned bytes of the baseline recipe, if any."""
        plan, base = self.experiment.plan, self.experiment.baseline
        if self.experiment.model.partial:
            return Text()
        words = [change_text(plan.stored_bytes, plan.planned_bytes)]
        words += [f"P {human_bytes(base.planned_bytes)}"] if base is not None else []
        return Text("  ".join(filter(None, words)), "dim")

    def draw(self, activity: str, node: str) -> RenderableType:
        experiment = self.experiment
        plan = experiment.plan
        if experiment.model.partial:
            return Text("Bytes appear when all headers are read.", style="dim")
        lines = self._by_dtype()
        if self.is_zoomed:
            table = rows_table(memory_rows(experiment))
            table.title = Text("\n").join([*lines, Text()])
            table.title_justify, table.title_style = "left", ""
            return table
        line = _row("planned", human_bytes(plan.planned_bytes), f" of {human_bytes(plan.stored_bytes)}", bold=True)
        if line.cell_len + len(" stored") <= self.columns:
            line.append(" stored", "dim")
        lines.append(line)
        serving = experiment.serving()
        if serving.kv_dtypes:
            lines.append(_row("KV cache", human_bytes(serving.kv_bytes), f" {experiment.context_words}"))
        if serving.activations is not None:
            beside = f", a pass {short_bytes(serving.activations.nbytes)}"
            lines.append(_row("together", human_bytes(serving.total_bytes), beside))
        for sentence in budget_words(serving):
            lines += [Text(part, "dim") for part in textwrap.wrap(sentence, self.columns)]
        if not experiment.model.live and experiment.room and not experiment.served.budget:
            fits = "fits" if plan.planned_bytes <= experiment.room else "does not fit"
            lines.append(Text(f"{fits} {human_bytes(experiment.room)} of memory", "dim"))
        if experiment.memory is not None:
            lines += _held(experiment.memory, plan.stored_bytes)
        if self.lines - len(lines) > 2 and len(experiment.tree.order) <= _MOST_BY_KIND:
            lines += self._by_kind()[: self.lines - len(lines)]
        for line in lines:
            line.truncate(self.columns, overflow="ellipsis")
        return Text("\n").join(lines)

    def _by_kind(self) -> list[Text]:
        """Return an empty line, then a line for each kind of layer, such as attention, with its planned bytes and share."""
        whole, lines = max(1, self.experiment.plan.planned_bytes), [Text()]
        for kind, totals in totals_by_kind(self.experiment.tree, self.experiment.plan.dtypes).items():
            share = totals.total_bytes / whole
            lines.append(_row(f"{kind:<12}", f"{short_bytes(totals.total_bytes):>9} ", f"{percent(share):>3} % "))
            lines[-1].append_text(Text.assemble(*meter(share, 14, "dim")[:1]))
        return lines

    def _by_dtype(self) -> list[Text]:
        """Return two lines: a bar with a section for each dtype, whose empty part stands for the bytes saved, and its legend."""
        shares = self.experiment.totals[""].mix()
        plan, width = self.experiment.plan, self.columns
        whole = max(plan.stored_bytes, plan.planned_bytes)
        bar = Text.assemble(*stacked(shares, width, plan.planned_bytes / whole if whole else 0.0))
        legend = Text(no_wrap=True)
        for index, (dtype, share) in enumerate(shares):
            entry = f" {dtypes.short_name(dtype)} {percent(share)} %"
            more = f"  +{len(shares) - index}"
            last = index == len(shares) - 1
            if index and len(legend) + 3 + len(entry) + (0 if last else len(more)) > width:
                legend.append(more, "dim")
                break
            legend.append("  " if index else "")
            legend.append("■", colour(dtype))
            legend.append(entry)
        return [bar, legend]


def _held(memory: MemoryStats, stored: int) -> list[Text]:
    """Return the lines about the memory of the model and the process. stored: the bytes that a pass reads."""
    lines = []
    if memory.read_bytes is not None:  # then the weights are not resident
        lines.append(_row("read", short_bytes(memory.read_bytes), f", a pass {short_bytes(stored)}"))
    elif memory.resident_bytes is not None:
        devices = ", ".join(name for name, size in memory.resident_by_device if size)
        lines.append(_row("resident", human_bytes(memory.resident_bytes), f" {devices}"))
        limits = dict(memory.limits)
        for name, size in memory.resident_by_device:
            if limit := limits.get(name, limits.get(name.partition(":")[0])):
                filled = meter(size / limit, 8, heat(min(1.0, size / limit)))
                words = f" {short_bytes(size)} of {short_bytes(limit)}"
                lines.append(Text.assemble((f"{name:<{_LABEL}}", "dim"), *filled, (words, "dim")))
    if memory.device_allocated_bytes is not None:
        peak = f", peak {short_bytes(memory.device_peak_bytes or 0)}"
        lines.append(_row("device", short_bytes(memory.device_allocated_bytes), peak))
    if memory.rss_bytes is not None:
        peak = f", peak {short_bytes(memory.peak_rss_bytes)}" if memory.peak_rss_bytes is not None else ""
        lines.append(_row("process", short_bytes(memory.rss_bytes), peak))
    return lines


def _row(label: str, size: str, rest: str, bold: bool = False) -> Text:
    return Text.assemble((f"{label:<{_LABEL}}", "dim"), (size, "bold" if bold else ""), (rest, "dim"))
