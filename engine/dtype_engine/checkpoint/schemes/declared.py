"""What config.json declares about quantised weights, as far as several schemes declare it in the same form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

FLOATS = ("float32", "bfloat16", "float16")
"""The dtypes that scales of integer codes may have."""


def quantization(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the content of `quantization_config`, or an empty mapping if there is none. config: the content of config.json. Models
    with images or sound may declare it in their `text_config`.
    """
    inner = config.get("text_config")
    for place in (config, inner if isinstance(inner, Mapping) else {}):
        declared = place.get("quantization_config")
        if isinstance(declared, Mapping):
            return declared
    return {}


def quant_method(declared: Mapping[str, Any]) -> str:
    """Return the declared `quant_method`, such as "gptq", or "" if there is none. AutoRound was "intel/auto-round" at first."""
    return str(declared.get("quant_method") or "").removeprefix("intel/")


def declared_numbers(declared: Mapping[str, Any], key: str) -> set[int]:
    """Return the numbers that are declared under a key, such as "bits": that of the whole model, and those of single modules, which
    GPTQModel declares in `dynamic` and AutoRound in `extra_config`.
    """
    found = {declared.get(key)}
    for overrides in (declared.get("dynamic"), declared.get("extra_config")):
        if isinstance(overrides, Mapping):
            found |= {module.get(key) for module in overrides.values() if isinstance(module, Mapping)}
    return {number for number in found if type(number) is int}


def group_size(declared: Iterable[int], columns: int, groups: int) -> int | None:
    """Return the number of columns of a group, or None if no declared size divides the columns into this number of groups. The last
    group may be smaller. A declared size of -1 means one group for the whole row.
    """
    for size in sorted(declared):
        columns_each = columns if size == -1 else size
        if min(columns, columns_each) > 0 and -(-columns // columns_each) == groups:
            return columns_each
    return None


def block_name(size: int, columns: int) -> str:
    """Return the name of a block in a format's name: "channel" for whole rows, or such as "g128" for groups of 128 columns."""
    return "channel" if size >= columns else f"g{size}"
