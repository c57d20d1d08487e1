"""The Textual messages about events of the engine."""

from __future__ import annotations

from textual.message import Message

from dtype_engine.service import events


class EventWaits(Message, bubble=False):
    """Tells the main screen that one more event of the engine waits to be handled."""


class EngineEvent(Message, bubble=False):
    """An event of the engine, passed on to every open window."""

    def __init__(self, event: events.Event) -> None:
        super().__init__()
        self.event = event
