"""The main screen's keys for the help, grouped by task. Each description is short enough for a column."""

from __future__ import annotations

Entry = tuple[str, tuple[str, ...]]
"""(description, ids of the bindings that it describes)."""

GROUPS: tuple[tuple[str, tuple[Entry, ...]], ...] = (
    (
        "Look",
        (
            ("a line up, down", ("move-previous", "move-next")),
            ("open, or first child", ("open",)),
            ("close, or parent", ("close",)),
            ("open or close", ("open-or-close",)),
            ("a page up, down", ("page-previous", "page-next")),
            ("first, last line", ("end-previous", "end-next")),
            ("sibling before, after", ("sibling-previous", "sibling-next")),
            ("parent", ("parent",)),
            ("cast node before, after", ("next-cast-previous", "next-cast-next")),
            ("open, close all below", ("expand-all", "collapse-all")),
            ("details of the node", ("details",)),
            ("values of a tensor", ("values",)),
            ("next pane", ("next-pane",)),
            ("order: model, bytes, drift", ("next-order",)),
        ),
    ),
    (
        "Cast",
        (
            ("cast by a pattern", ("cast",)),
            ("undo, redo", ("undo", "redo")),
            ("drop the node's rules", ("drop-rules",)),
            ("presets", ("presets",)),
            ("apply the remedy", ("remedy",)),
        ),
    ),
    (
        "Measure",
        (
            ("measure again", ("measure",)),
            ("drift over depth, causes", ("causes",)),
            ("the worst module", ("worst",)),
            ("dtype flow: silent casts", ("flow",)),
            ("generate text with both", ("generate",)),
            ("time forward passes", ("speed",)),
            ("history: compare recipes", ("history",)),
            ("inputs of the model", ("inputs",)),
            ("settings of a run", ("settings",)),
        ),
    ),
    (
        "Find",
        (
            ("filter by name", ("filter",)),
            ("next, previous match", ("match-next", "match-previous")),
            ("command line", ("command",)),
            ("palette: every action", ("command-palette",)),
            ("copy the name, the rules", ("copy-name", "copy-rules")),
        ),
    ),
    (
        "Search",
        (
            ("scan: what each weight costs", ("scan",)),
            ("the best recipe for a budget", ("optimise",)),
        ),
    ),
    (
        "Stop and leave",
        (
            ("stop what runs", ("stop",)),
            ("jobs: stop one of them", ("jobs",)),
            ("start the engine again", ("restart-engine",)),
            ("messages so far", ("messages",)),
            ("write a checkpoint, recipe", ("leave-with",)),
            ("suspend; fg comes back", ("suspend-process",)),
            ("this help", ("help",)),
            ("the tour", ("tour",)),
            ("quit", ("quit",)),
        ),
    ),
)
"""(title, entries) of each group."""
