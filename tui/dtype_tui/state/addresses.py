"""Recognises addresses of models on other machines."""

from __future__ import annotations

SCHEME = "ssh://"


def is_address(model: str | None) -> bool:
    """Return whether MODEL of the command line is an address on another machine."""
    return model is not None and model.startswith(SCHEME)
