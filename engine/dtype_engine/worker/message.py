"""What the app and the engine say to each other."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """A command or an event, in one process or between two. On the wire it is an array: the name of its class, then its fields."""
