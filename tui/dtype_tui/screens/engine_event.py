"""What the engine tells, as a message to the screens."""

from __future__ import annotations

from textual.message import Message

from dtype_engine.worker import events


class EngineEvent(Message, bubble=False):
    """Posted to the main screen from the engine's threads, which hands it on to every window that is open."""

    def __init__(self, event: events.Event) -> None:
        super().__init__()
        self.event = event
