"""The engine's sentences for the app: an option of the command line becomes the key that does the same."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from dtype_engine.worker.events import Event

_IN_THE_APP = (
    (
        "tensors with --inputs FILE.safetensors, .npz or .pt",
        "tensors from a .safetensors, .npz or .pt file with the key i",
    ),
    ("tensors with --inputs", "tensors with the key i"),
    ("leave --image out", "leave the picture out (key i)"),
    ("leave --audio out", "leave the sound out (key i)"),
    ("without messages or --chat", "without messages or the word chat"),
    (", or replace it with --force", ""),
    ("turn torch.autocast off first", "turn torch.autocast off first (key ,)"),
)


def in_the_app(sentence: str) -> str:
    """A sentence of the engine with keys in place of options."""
    for option, key in _IN_THE_APP:
        sentence = sentence.replace(option, key)
    return sentence


def heard_in_the_app(event: Event) -> Event:
    """An event with keys in place of options in its sentences."""
    event_of_any_kind: Any = event
    fields = {
        name: in_the_app(value)
        for name in ("message", "no_forward", "sentence", "reason")
        if isinstance(value := getattr(event, name, None), str)
    }
    return cast(Event, msgspec.structs.replace(event_of_any_kind, **fields)) if fields else event
