"""The program's own theme; all others are Textual's."""

from __future__ import annotations

from textual.theme import Theme

IN_THE_TERMINALS_COLOURS = ("textual-dark", "ansi-dark", "ansi-light")
"""Themes in which the tree has the terminal's own foreground and background: the default, and those that are made of them."""

HIGH_CONTRAST = Theme(
    name="high-contrast",
    primary="#ffffff",
    secondary="#ffff00",
    accent="#00ffff",
    foreground="#ffffff",
    background="#000000",
    surface="#000000",
    panel="#000000",
    success="#00ff00",
    warning="#ffff00",
    error="#ff6b6b",
    dark=True,
    variables={"surface-lighten-2": "#ffffff", "block-cursor-text-style": "reverse"},
)
"""White on black, yellow and cyan for what stands out: every pair of colours contrasts by at least 7 to 1."""
