"""The two lines at the bottom: what the engine is doing, and the keys that the user probably needs next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from rich.style import Style
from rich.text import Text
from textual.binding import Binding

from dtype_tui.config.bindings import KEYS
from dtype_tui.config.key_names import keys_of, on_keyboard
from dtype_tui.rendering.cells import short_bytes
from dtype_tui.rendering.palette import ACCENT
from dtype_tui.state.activity import Activity
from dtype_tui.state.experiment import Experiment
from dtype_tui.widgets.line import ACTION

if TYPE_CHECKING:
    from dtype_engine.results.drift import PartialDrift

_DTYPES = ("", "dtype")
"""The pair for the keys 1 to 8. It has no binding id, because each of these keys has its own binding."""
_ALWAYS = (("help", "help"), ("quit", "quit"))
_CAST = (_DTYPES, ("cast", "cast"), ("undo", "undo"))
_USUAL = (
    ("worst", "worst"), ("scan", "scan"), ("optimise", "optimise"), ("flow", "flow"), ("leave-with", "save"),
    ("filter", "find"), ("command", "command"), ("details", "details"),
)  # fmt: skip


def next_keys(experiment: Experiment, filtered: bool, working: Activity, ended: bool) -> list[tuple[str, str]]:
    """Return pairs (binding id, meaning) of keys, first the keys that the user probably needs next. filtered: whether the tree has
    a filter. working: the engine's jobs. ended: whether the engine has ended.
    """
    results, busy, scanned = experiment.results, working.busy, experiment.scan.finished and experiment.has_scan
    report = results.report or experiment.before  # while the next measurement runs, the keys stay where they are
    if filtered:
        first = [("match-next", "next match"), ("match-previous", "previous"), ("stop", "clear the filter"), *_CAST]
    elif ended:
        first = [("restart-engine", "start the engine"), *_CAST]
    elif results.failure:
        first = [("undo", "undo"), ("cast-node-stored", "as stored"), ("details", "details"), ("measure", "measure")]
    elif not busy and results.nonfinite is not None and results.nonfinite.remedy is not None:
        first = [("remedy", "make it finite"), *_CAST]
    elif not busy and results.loss_remedy is not None:
        first = [("remedy", "keep the lost values"), *_CAST]
    elif scanned and not experiment.recipe.rules:
        first = [("optimise", "optimise"), *_CAST[:2], ("presets", "presets"), ("filter", "find")]
    elif scanned and report is not None:  # a recipe of the front, or one to compare with it
        first = [("leave-with", "save"), ("optimise", "optimise"), *_CAST]
    elif not experiment.recipe.rules:
        first = [*_CAST[:2], ("scan", "scan"), ("optimise", "optimise"), ("presets", "presets"), ("filter", "find")]
    elif results.report is None and not busy and experiment.model.no_forward is None:
        first = [("measure", "measure"), *_CAST]
    else:
        first = [*_CAST]
    if working.queue:
        first.insert(0, ("jobs", "stop a job"))
    if busy and not filtered and not ended:  # Esc clears a filter first
        if experiment.recipe.rules and first[0] == _DTYPES:
            first[0] = "stop", "stop "  # as wide as what it replaces, so that the other keys stay where they are
        else:
            first.insert(0, ("stop", "stop"))
    usual = _USUAL if report is not None and report.output.max_abs != 0 else _USUAL[1:]
    return list(dict.fromkeys((*first, *(each for each in usual if each[0] not in dict(first)))))


def key_line(pairs: list[tuple[str, str]], width: int, chosen: Mapping[str, str]) -> Text:
    """Return as many of `pairs` (binding id, meaning) as fit into `width` cells, then the keys for help and for quitting. chosen:
    the user's own keys, by binding id, such as {"measure": "f5"}.
    """
    end = _entries(_ALWAYS, chosen)
    left = width - 1 - sum(each.cell_len + 2 for each in end)
    shown: list[Text] = []
    for each in _entries(pairs, chosen):
        left -= each.cell_len + (2 if shown else 0)
        if left < 0:
            break
        shown.append(each)
    return Text.assemble(" ", Text("  ").join([*shown, *end]), no_wrap=True, overflow="ellipsis")


def _entries(pairs: Iterable[tuple[str, str]], chosen: Mapping[str, str]) -> list[Text]:
    bindings = {binding.id: binding for binding in KEYS if isinstance(binding, Binding)}
    entries = []
    for name, meaning in pairs:
        if not name:
            entries.append(Text.assemble(("1-8", f"bold {ACCENT}"), f" {meaning}"))
            continue
        binding = bindings[name]
        key = on_keyboard(keys_of(binding, chosen).partition(",")[0])
        action = binding.action if "." in binding.action else f"screen.{binding.action}"
        entry = Text.assemble((key, f"bold {ACCENT}"), f" {meaning}")
        entry.stylize(Style(meta={ACTION: action}))
        entries.append(entry)
    return entries


def status_line(
    experiment: Experiment,
    doing: tuple[str, float | None, str],
    working: Activity,
    idle: str,
    width: int,
    chosen: Mapping[str, str],
) -> Text:
    """Return the status line: what the engine is doing, its progress, the bytes that it has read if the model runs from the disk,
    the waiting jobs, and what Esc does; then, if there is room, the keys for jobs, messages and history.

    doing: what the engine is doing, or "" if idle; the share (0 to 1) of it that is done; and what Esc does now, or "" if it stops
    that, which the keys below say. working: the
    engine's jobs. idle: the words to show while the engine is idle. chosen: the user's own keys, by binding id.
    """
    activity, share, stops = doing
    line = Text(" ", no_wrap=True, overflow="ellipsis")
    line.append("● ", style=ACCENT if activity else "green" if idle == "ready" else "yellow")
    if activity:
        line.append(activity)
        if share is not None:
            line.append(f" {working.progress_words(12 if width >= 100 else 6)}")
        waits = f"  next: {working.queue}" if working.queue else ""
        if experiment.memory is not None and experiment.memory.read_bytes:  # the model runs from the disk
            read = f"  {short_bytes(experiment.memory.read_bytes)} read"
            if line.cell_len + len(f"{read}{waits}  {stops} ") <= width:
                line.append(read)
        if experiment.results.partial_drift is not None:
            left = width - line.cell_len - len(f"  {waits}  {stops} ")
            line.append(f"  {_so_far(experiment.results.partial_drift, left)}")
        line.append(waits, style="dim")
        line.append(f"  {stops}" if stops else "", style="dim")
    else:
        line.append(idle)
    if losses := experiment.results.losses.values:
        from dtype_engine.reports.text_losses import headline  # imported late, for a faster first paint

        if lost := headline(losses):
            line.append(f"  ⚠ {lost}", style="bold red")
    count = f" {len(experiment.measured)}" if experiment.measured else ""
    more = _entries((("jobs", "jobs"), ("messages", "messages"), ("history", f"history{count}")), chosen)
    while more and line.cell_len + sum(each.cell_len + 2 for each in more) + 2 > width:
        more.pop(0)
    end = Text("  ").join(more)
    line.append(" " * max(1, width - line.cell_len - end.cell_len - 1))
    return line.append_text(end) if more else line


def _so_far(partial: PartialDrift, width: int) -> str:
    """Return the drift so far of a running measurement. If it does not fit into `width` cells, return how many sequences have been
    run. If that does not fit either, return "".
    """
    from dtype_engine.reports.text_drift import extent_text, partial_text  # imported late, for a faster first paint

    whole = partial_text(partial)
    extent = extent_text(partial.extent).split(",")[0] if partial.output.is_finite else whole
    return next((words for words in (whole, extent) if len(words) < width), "")
