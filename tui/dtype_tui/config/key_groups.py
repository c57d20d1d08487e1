"""Groups the main screen's keys by task, for the help. Each description is short enough for one of the help's columns."""

from __future__ import annotations

from dtype_tui.config.key_names import name_of
from dtype_tui.config.questions import QUESTIONS

Entry = tuple[str, tuple[str, ...]]
"""A line of the help: (description, ids of the key bindings that the line describes)."""


def _questions_in(group: str) -> list[Entry]:
    return [(row.help, (name_of(row.action),)) for row in QUESTIONS if row.key and row.group == group]


_CAUSES, *_MEASURING = _questions_in("Measure")
GROUPS: dict[str, tuple[Entry, ...]] = {
    "Look": (
        ("a line up, down", ("move-previous", "move-next")),
        ("open, or first child", ("open",)),
        ("close, or parent", ("close",)),
        ("open or close", ("open-or-close",)),
        ("a page up, down", ("page-previous", "page-next")),
        ("first, last line", ("end-previous", "end-next")),
        ("previous, next sibling", ("sibling-previous", "sibling-next")),
        ("parent", ("parent",)),
        ("previous, next cast node", ("next-cast-previous", "next-cast-next")),
        ("open, close all below", ("expand-all", "collapse-all")),
        ("fold alike layers, or not", ("fold",)),
        ("details of the node", ("details",)),
        *_questions_in("Look"),
        ("next pane", ("next-pane",)),
        ("jump to a label", ("jump",)),
        ("a pane alone, and back", ("zoom",)),
        ("order: model, bytes, drift", ("next-order",)),
    ),
    "Cast": (
        ("cast by a pattern", ("cast",)),
        ("undo, redo", ("undo", "redo")),
        ("drop the node's rules", ("drop-rules",)),
        ("change, move the rules", ("rules",)),
        ("presets", ("presets",)),
        ("apply the remedy", ("remedy",)),
    ),
    "Measure": (
        ("measure again", ("measure",)),
        _CAUSES,
        ("the worst module", ("worst",)),
        *_MEASURING,
        ("history: compare recipes", ("history",)),
        ("inputs of the model", ("inputs",)),
        ("settings of a run", ("settings",)),
    ),
    "Find": (
        ("filter by name", ("filter",)),
        ("next, previous match", ("match-next", "match-previous")),
        ("command line", ("command",)),
        ("palette: find an action", ("command-palette",)),
        ("copy the name, the rules", ("copy-name", "copy-rules")),
    ),
    "Search": (
        ("scan: drift of each weight", ("scan",)),
        ("the best recipe for a budget", ("optimise",)),
    ),
    "Stop and leave": (
        ("stop the running job", ("stop",)),
        ("jobs: stop one of them", ("jobs",)),
        ("run from the disk", ("over-memory",)),
        ("restart the engine", ("restart-engine",)),
        ("all messages", ("messages",)),
        ("write a checkpoint, recipe", ("leave-with",)),
        ("suspend; fg resumes", ("suspend-process",)),
        ("repaint the screen", ("repaint",)),
        ("this help", ("help",)),
        ("the tour", ("tour",)),
        ("quit", ("quit",)),
    ),
}
