"""The Textual message that carries an event of the engine to the screens."""

from __future__ import annotations

from textual.message import Message

from dtype_engine.worker import events


class EngineEvent(Message, bubble=False):
    """A message that the engine's threads post to the main screen, which passes it on to every open window."""

    def __init__(self, event: events.Event) -> None:
        super().__init__()
        self.event = event
