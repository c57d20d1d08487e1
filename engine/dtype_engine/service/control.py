"""Messages about a connection between two processes, and the app's requests that are not commands."""

from __future__ import annotations

from dtype_engine.core.options import Options
from dtype_engine.recipe import Recipe
from dtype_engine.service.message import Message

PROTOCOL = 7
"""The version of the protocol. Increase it whenever a message changes."""


class Hello(Message, frozen=True):
    """The engine's first message on a connection."""

    protocol: int
    version: str
    missing: tuple[str, ...] = ()
    """Packages that the engine needs but that are not installed."""
    requests: int = 0
    """How many requests the engine has received since `Open`. After a reconnection, the app repeats all later requests."""
    is_open: bool = False
    """Whether the engine still has a model open from an earlier connection."""


class Open(Message, frozen=True):
    """The app's first message to a new engine: which model to open, and how."""

    model: str | None
    """The command line's MODEL; None for the demo."""
    options: Options
    read_headers: bool
    recipe: Recipe = Recipe()
    """The first recipe. If one of its rules matches nothing, the engine refuses to open the model."""


class Resume(Message, frozen=True):
    """The app's first message after it has reconnected to an engine that kept running."""

    received: int
    """How many events the app has received from this engine."""


class Opened(Message, frozen=True):
    """The engine's answer to `Open`: the title of the model, or why it can't be opened."""

    title: str
    refusal: str = ""


class Acknowledge(Message, frozen=True):
    """Tells the engine how many events have arrived. The engine need not keep these events for a reconnection."""

    received: int


class PlanExport(Message, frozen=True):
    """Asks for an `ExportPlanned` event."""


class CheckPath(Message, frozen=True):
    """Asks for a `PathChecked` event. `for_export`: whether the path is an export's folder, otherwise a file."""

    path: str
    for_export: bool


class Close(Message, frozen=True):
    """Ends the engine, because the app will not reconnect."""


FromTheApp = Open | Resume | Acknowledge | PlanExport | CheckPath | Close
