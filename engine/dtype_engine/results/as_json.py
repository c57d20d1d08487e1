"""Converts results to the objects that `--json` prints, in which each field is a key."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import msgspec

from dtype_engine.results.drift import OutputDrift
from dtype_engine.results.figures import FIGURES


def as_json(value: Any) -> Any:
    """Return a result as an object for JSON. Infinity and NaN become None. Fields with the metadata `json=False` are left out."""
    if isinstance(value, OutputDrift):
        figures = value.by_name() | {row.name: row.of(value) for row in FIGURES.values()}
        return as_json({**figures, "groups": value.groups})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (field for field in dataclasses.fields(value) if field.metadata.get("json", True))
        return {field.name: as_json(getattr(value, field.name)) for field in fields}
    if isinstance(value, msgspec.Struct):
        return {name: as_json(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
