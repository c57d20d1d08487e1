"""The base class of all messages between the app and the engine."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """A command or an event. Between processes it is an array: the name of its class, then the values of its fields."""
