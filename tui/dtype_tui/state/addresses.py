"""Recognizes `ssh://` addresses, which name models on other machines."""

from __future__ import annotations


def is_address(model: str | None) -> bool:
    """Return whether the command-line argument MODEL is the address of a model on another machine."""
    return model is not None and model.startswith("ssh://")
