"""What the engine tells, as a message to the screens."""

from __future__ import annotations

from textual.message import Message

from dtype_engine.worker import events


class EngineEvent(Message, bubble=False):
    """Posted to the main screen from the engine's threads, which hands it on to every window that is open."""

    def __init__(self, event: events.Event) -> None:
        super().__init__()
        self.event = event

    def can_replace(self, message: Message) -> bool:
        """Whether `message`, the next in the queue, makes this one old: a later progress of the same type does, a result never."""
        return (
            isinstance(message, EngineEvent)
            and isinstance(self.event, events.REPLACEABLE)
            and type(message.event) is type(self.event)
        )
