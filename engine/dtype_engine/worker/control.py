"""The messages about a connection between two processes, and the app's requests that are not commands."""

from __future__ import annotations

from dtype_engine.core.options import Options
from dtype_engine.recipe import Recipe
from dtype_engine.worker.message import Message

PROTOCOL = 3
"""The version of the protocol. Increase it whenever a message changes."""


class Hello(Message, frozen=True):
    """The engine's first message."""

    protocol: int
    version: str
    missing: tuple[str, ...] = ()
    """Packages that the engine needs and that are not installed."""
    requests: int = 0
    """How many requests the engine has received since `Open`."""
    is_open: bool = False
    """Whether the engine has a model from an earlier connection."""


class Open(Message, frozen=True):
    """The app's first message to a new engine: the arguments of its `Worker`."""

    model: str | None
    """MODEL as on the command line."""
    options: Options
    read_headers: bool
    recipe: Recipe = Recipe()
    """If one of its rules matches nothing, the engine refuses to open the model."""


class Resume(Message, frozen=True):
    """The app's first message after it has reconnected to an engine."""

    received: int
    """How many events the app has received from this engine."""


class Opened(Message, frozen=True):
    """The engine's answer to `Open`: the title of the model, or why it can't be opened."""

    title: str
    refusal: str = ""


class Acknowledge(Message, frozen=True):
    """Says that the engine need not keep the events that the app has received."""

    received: int
    """How many events the app has received from this engine."""


class PlanExport(Message, frozen=True):
    """Requests what `Engine.plan_export` emits."""


class CheckPath(Message, frozen=True):
    """Requests what `Engine.check_path` emits."""

    path: str
    for_export: bool


class Close(Message, frozen=True):
    """Ends the engine, because the app will not reconnect."""


FromTheApp = Open | Resume | Acknowledge | PlanExport | CheckPath | Close
