"""The Memory pane: the bytes of the checkpoint as stored and as planned, of the tensors in memory, and of the whole process."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from dtype_engine.core import dtypes
from dtype_engine.core.units import change_text, human_bytes, percent
from dtype_tui.rendering.cells import short_bytes
from dtype_tui.rendering.palette import colour
from dtype_tui.rendering.plain_table import PlainTable
from dtype_tui.widgets.panes.base import Pane


class MemoryPane(Pane):
    """Shows the bytes of the checkpoint as stored and as planned, of the tensors in memory, and of the whole process."""

    HELP = (
        "stored: the checkpoint's tensors. planned: the same under the recipe, including scales, with tied weights counted once; "
        "percentages are shares of these bytes, or the change from stored. "
        "resident: all tensors of the live model now. process: the resident set; anonymous is the process's private memory, mapped "
        "are pages of the checkpoint's files, which the system can reclaim. peak: of the process since the last "
        "measurement began. kept: outputs of modules that the next measurement reuses, and their limit (--keep); they "
        "are part of the process or, if the model is on a device, of the device."
    )

    def draw(self, activity: str, node: str) -> Text | Table:
        experiment = self.experiment
        plan, memory = experiment.plan, experiment.memory
        if experiment.model.partial:
            return Text("Bytes appear when all headers are read.", style="dim")
        grid = PlainTable.labelled(gap=1)
        change = change_text(plan.stored_bytes, plan.planned_bytes)
        grid.add_row("stored", human_bytes(plan.stored_bytes))
        grid.add_row("planned", Text.assemble((human_bytes(plan.planned_bytes), "bold"), f"  {change}"))
        if experiment.baseline is not None:
            grid.add_row("P planned", human_bytes(experiment.baseline.planned_bytes))
        grid.add_row("by bytes", self._mix())
        if memory is None:
            return grid
        if memory.resident_bytes is not None:
            devices = ", ".join(f"{name} {human_bytes(size)}" for name, size in memory.resident_by_device if size)
            grid.add_row("resident", devices or human_bytes(memory.resident_bytes))
        if memory.rss_bytes is not None:
            peak = f", peak {short_bytes(memory.peak_rss_bytes)}" if memory.peak_rss_bytes is not None else ""
            grid.add_row("process", f"{short_bytes(memory.rss_bytes)}{peak}")
            if memory.anonymous_bytes is not None:
                grid.add_row("anonymous", human_bytes(memory.anonymous_bytes))
            if memory.mapped_bytes is not None:
                grid.add_row("mapped", f"{human_bytes(memory.mapped_bytes)} of the checkpoint")
        if memory.kept_bytes is not None:
            most = f" of {short_bytes(memory.kept_budget_bytes)}" if memory.kept_budget_bytes is not None else ""
            grid.add_row("kept", f"{human_bytes(memory.kept_bytes)}{most}: outputs")
        if memory.device_allocated_bytes is not None:
            grid.add_row(
                "device",
                f"allocated {human_bytes(memory.device_allocated_bytes)}, reserved "
                f"{human_bytes(memory.device_reserved_bytes or 0)}, peak {human_bytes(memory.device_peak_bytes or 0)}",
            )
        return grid

    def _mix(self) -> Text:
        """Return a bar of the planned bytes with a section for each dtype, and a legend.

        The full width of the bar is the stored or the planned size, whichever is larger.
        """
        shares = self.experiment.totals[""].mix()
        plan = self.experiment.plan
        width = max(10, self.columns - 12)
        whole = max(plan.stored_bytes, plan.planned_bytes)
        text = Text()
        drawn = 0
        for index, (dtype, share) in enumerate(shares):
            cells = round(width * share * plan.planned_bytes / whole) if whole else 0
            cells = max(cells, 1 if share else 0)
            text.append("█▓▒░"[min(index, 3)] * cells, style=colour(dtype))
            drawn += cells
        text.append("·" * max(0, width - drawn), style="dim")
        used = width  # the legend starts on a new line, and no entry is wrapped
        for index, (dtype, share) in enumerate(shares):
            entry = f" {dtypes.short_name(dtype)} {percent(share)} %"
            fits = used + 3 + len(entry) <= width
            text.append("  " if fits else "\n")
            text.append("█▓▒░"[min(index, 3)], style=colour(dtype))
            text.append(entry)
            used = (used + 2 if fits else 0) + 1 + len(entry)
        return text
