"""What the two processes say about their connection, and what the app asks an engine besides commands."""

from __future__ import annotations

from dtype_engine.core.options import Options
from dtype_engine.recipe import Recipe
from dtype_engine.worker.message import Message

PROTOCOL = 3
"""Changes with every message that changes."""


class Hello(Message, frozen=True):
    """The engine's first message."""

    protocol: int
    version: str
    missing: tuple[str, ...] = ()
    """Packages that it needs and does not have."""
    requests: int = 0
    """How many it has had, after `Open`."""
    is_open: bool = False
    """It has a model from an earlier connection."""


class Open(Message, frozen=True):
    """The app's first message to a new engine: what `Worker` is made of."""

    model: str | None
    """As on the command line."""
    options: Options
    read_headers: bool
    recipe: Recipe = Recipe()
    """Rules that are refused, and the model with them, where one takes nothing."""


class Resume(Message, frozen=True):
    """The app's first message to an engine that it had before."""

    received: int
    """How many events the app has had of it."""


class Opened(Message, frozen=True):
    """The engine's answer to `Open`: what MODEL means there, or why it means nothing."""

    title: str
    refusal: str = ""


class Acknowledge(Message, frozen=True):
    """The engine need not keep the events that the app has had."""

    received: int
    """How many these are."""


class PlanExport(Message, frozen=True):
    """`Engine.plan_export`."""


class CheckPath(Message, frozen=True):
    """`Engine.check_path`."""

    path: str


class Close(Message, frozen=True):
    """End: the app will not come back."""


FromTheApp = Open | Resume | Acknowledge | PlanExport | CheckPath | Close
