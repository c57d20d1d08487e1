"""The two lines at the bottom: what the engine is doing, and the keys that the user probably needs next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from dtype_engine.core.text import printable
from dtype_engine.reports.text_drift import extent_text, partial_text
from dtype_engine.results.meaning import meaning
from dtype_tui.rendering.loss_text import loss_status
from dtype_tui.state.activity import Activity
from dtype_tui.state.experiment import Experiment

if TYPE_CHECKING:
    from dtype_engine.results.drift import PartialDrift

ALWAYS = "? help  q quit"


def next_keys(experiment: Experiment, filtered: bool, working: Activity, ended: bool, width: int) -> str:
    """Return keys with their meanings for the current state, the most likely first: as many as fit into `width` cells.

    The keys for help and quitting are always included. filtered: whether the tree is filtered. ended: whether there is no engine.
    """
    busy = working.busy
    if filtered:
        keys = "n next match  N previous  Esc clears the filter  c cast  1-8 dtype"
    elif ended:
        keys = "R start the engine  u undo  c cast  1-8 dtype  / filter  Enter details  : command"
    elif experiment.results.failure:
        keys = "u undo  8 as stored  Enter details  m measure again  : command"
    elif experiment.results.loss_remedy is not None and not busy:
        keys = "a keeps the lost values  w worst module  u undo  c cast  1-8 dtype  Enter details  : command"
    elif not experiment.recipe.rules:
        keys = "2 cast this to bf16  c cast by pattern  / filter  Enter details  : command"
    elif experiment.results.report is None and not busy and experiment.model.no_forward is None:
        keys = "m measure  u undo  c cast  1-8 dtype  f dtype flow  : command"
    elif experiment.results.report is not None and experiment.results.report.output.max_abs > 0:
        keys = "w worst module  u undo  c cast  1-8 dtype  f dtype flow  : command"
    else:
        keys = "u undo  c cast  1-8 dtype  / filter  Enter details  : command"
    pairs = keys.split("  ")
    if working.queue:
        pairs.insert(0, "J stops one of the jobs")
    while pairs and len(line := f" {'  '.join(pairs)}  {ALWAYS}") > width:
        pairs.pop()
    return line if pairs else f" {ALWAYS}"


def status_line(
    experiment: Experiment, doing: tuple[str, float | None, str], working: Activity, idle: str, width: int
) -> Text:
    """Return the status line: what the engine is doing, its progress, the waiting jobs, and what Esc does.

    If there is room, the model, its class and its device follow at the right end. doing: what the engine is doing, or "" if idle;
    the share (0 to 1) of it that is done; and what Esc does now. idle: the words to show while the engine is idle.
    """
    activity, share, stops = doing
    line = Text(" ", no_wrap=True, overflow="ellipsis")
    if activity:
        line.append(activity)
        if share is not None:
            line.append(f" {working.progress_words(12 if width >= 100 else 6)}")
        waits = f" · then: {working.queue}" if working.queue else ""
        if experiment.results.partial_drift is not None:
            left = width - line.cell_len - len(f"  {waits}  {stops} ")
            line.append(f"  {_so_far(experiment.results.partial_drift, left, printable(experiment.model.title, 40))}")
        line.append(waits)
        line.append(f"  {stops}", style="dim")
    else:
        line.append(idle)
        if experiment.results.report is not None:
            line.append(f" · drift: {meaning(experiment.results.report.output, experiment.floor).word}")
    if lost := loss_status(experiment.results.losses.values or ()):
        line.append(f"  {lost}", style="bold")
    where = printable(experiment.model.device or experiment.model.host, 40)
    class_name = printable(experiment.model.class_name, 60)
    parts = [part for part in (printable(experiment.model.title, 40), class_name, where) if part]
    while parts and line.cell_len + len(" · ".join(parts)) + 2 > width:
        parts.pop(min(1, len(parts) - 1))  # leave out the class first, then the device
    about = " · ".join(parts)
    line.append(" " * max(1, width - line.cell_len - len(about) - 1))
    line.append(about, style="dim")
    return line


def _so_far(partial: PartialDrift, width: int, title: str) -> str:
    """Return the drift that a running measurement has found until now, such as `KL 1.234e-03 ± 2e-05 nats, 2 of 6 sequences`.

    Returns only the number of sequences if the whole text does not leave room for `title` in `width` cells.
    """
    whole = partial_text(partial)
    extent = extent_text(partial.extent).split(",")[0] if not partial.output.nonfinite else whole
    return next(
        (words for words in (whole, extent) if len(words) + len(title) < width), extent if len(extent) < width else ""
    )
