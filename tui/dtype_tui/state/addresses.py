"""Which models are on other machines."""

from __future__ import annotations

SCHEME = "ssh://"


def is_address(model: str | None) -> bool:
    """Whether MODEL is on another machine."""
    return model is not None and model.startswith(SCHEME)
