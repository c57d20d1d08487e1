"""What stands on the screen of an app under test."""

from __future__ import annotations

from typing import Any

from textual.app import App


def lines(app: App[Any]) -> list[str]:
    """What stands on the screen, line by line."""
    strips = app.screen._compositor.render_strips()
    return ["".join(segment.text for segment in strip) for strip in strips][: app.size.height]


def screen(app: App[Any]) -> str:
    return "\n".join(lines(app))


def notices(app: App[Any]) -> list[str]:
    return [notification.message for notification in app._notifications]
