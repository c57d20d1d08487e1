"""Results as `--json` prints them: a field is a key."""

from __future__ import annotations

import dataclasses
import math
from typing import Any


def as_json(value: Any) -> Any:
    """Dataclasses as dictionaries and figures that JSON has no word for (infinity, NaN) as null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
