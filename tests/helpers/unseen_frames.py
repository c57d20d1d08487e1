"""Frames of an app under test are rendered when a test looks at them.

Textual's headless driver writes nothing, and yet Textual renders each frame for it, which is a third of the time of such a test.
So that no fault of drawing passes unseen, each screen is rendered before another takes its place, and before the app ends, unless
a test has looked at its last frame.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from textual._compositor import Compositor
from textual._context import visible_screen_stack
from textual.app import App
from textual.screen import Screen

_refresh = Screen._compositor_refresh
_strips = Compositor.render_strips
_replaced = App._replace_screen
_pushed = App.push_screen
_shut_down = App._shutdown
_seen: WeakSet[Any] = WeakSet()
"""The screens whose last frame has been rendered."""


def leave_out() -> None:
    """From now on, in this process."""
    Screen._compositor_refresh = _keep_for_later  # type: ignore[method-assign]
    Compositor.render_strips = _look  # type: ignore[method-assign]
    App.push_screen = _push  # type: ignore[method-assign,assignment]
    App._replace_screen = _replace  # type: ignore[method-assign]
    App._shutdown = _shutdown  # type: ignore[method-assign]


def _keep_for_later(screen: Screen[Any]) -> None:
    if not screen.app.is_headless or screen.app.is_inline or screen is not screen.app.screen:
        _refresh(screen)
        return
    _seen.discard(screen)
    screen._compositor._dirty_regions.clear()
    screen._dirty_widgets.clear()
    screen.app._update_mouse_over(screen)


def _look(compositor: Compositor, *arguments: Any) -> Any:
    if compositor.root is not None:
        visible_screen_stack.set(compositor.root.app._background_screens)
        _seen.add(compositor.root)
    return _strips(compositor, *arguments)


def _push(app: App[Any], *arguments: Any, **named: Any) -> Any:
    _draw(app)
    return _pushed(app, *arguments, **named)


async def _replace(app: App[Any], screen: Screen[Any]) -> Screen[Any]:
    if screen.is_attached and screen.size and screen not in _seen:
        screen._compositor.render_strips()
    return await _replaced(app, screen)


async def _shutdown(app: App[Any]) -> None:
    _draw(app)
    await _shut_down(app)


def _draw(app: App[Any]) -> None:
    if app.is_headless and app._running and app._screen_stack and app.screen.size and app.screen not in _seen:
        app.screen._compositor.render_strips()
