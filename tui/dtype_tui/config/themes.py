"""The high-contrast theme."""

from __future__ import annotations

from textual.theme import Theme

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
"""White on black, with yellow and cyan. Every pair of colors has a contrast ratio of at least 7:1."""
