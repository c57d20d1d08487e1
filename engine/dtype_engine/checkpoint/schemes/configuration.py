"""What a checkpoint's configuration declares about its quantisation, and which of its entries apply to a module."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any


def declared(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of the quantisation in the content of config.json, or {} if it has none. Models with a part for images
    have them under `text_config`, and old files of compressed-tensors under `compression_config`.
    """
    for place in (config, config.get("text_config")):
        for key in ("quantization_config", "compression_config"):
            found = place.get(key) if isinstance(place, Mapping) else None
            if isinstance(found, Mapping):
                return found
    return {}


def size(value: object) -> int | None:
    """Return a number of rows or columns that a configuration declares, or None if it is not a positive integer."""
    return value if type(value) is int and value > 0 else None


def sizes(value: object) -> tuple[int, int] | None:
    """Return the rows and columns of a block, declared as [128, 128] or "128x128", or None if the value is no such pair."""
    pair = [int(word) if word.isdecimal() else 0 for word in value.split("x")] if isinstance(value, str) else value
    if not isinstance(pair, list) or len(pair) != 2 or size(pair[0]) is None or size(pair[1]) is None:
        return None
    return pair[0], pair[1]


def matches(pattern: object, module: str) -> bool:
    """Return whether a pattern names a module: its full name, `re:` with a regular expression, or a name with `*` for any text."""
    if not isinstance(pattern, str):
        return False
    if not pattern.startswith("re:"):
        return re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), module) is not None
    try:
        return re.match(pattern.removeprefix("re:"), module) is not None
    except re.error:
        return False


def quant_method(settings: Mapping[str, Any]) -> str:
    """Return the declared `quant_method`, such as "gptq", or "" if there is none. AutoRound was "intel/auto-round" at first."""
    return str(settings.get("quant_method") or "").removeprefix("intel/")


def declared_numbers(settings: Mapping[str, Any], key: str) -> set[int]:
    """Return the numbers that are declared under a key, such as "bits": that of the whole model, and those of single modules, which
    GPTQModel declares in `dynamic` and AutoRound in `extra_config`.
    """
    found = [settings.get(key)]
    for overrides in (settings.get("dynamic"), settings.get("extra_config")):
        if isinstance(overrides, Mapping):
            found += [module.get(key) for module in overrides.values() if isinstance(module, Mapping)]
    return {number for number in found if type(number) is int}


def group_size(sizes: Iterable[int], columns: int, groups: int) -> int | None:
    """Return the number of columns of a group, or None if no declared size divides the columns into this number of groups. The last
    group may be smaller. A declared size of -1 means one group for the whole row.
    """
    for each in sorted(sizes):
        wide = columns if each == -1 else each
        if min(columns, wide) > 0 and -(-columns // wide) == groups:
            return wide
    return None


def block_name(wide: int, columns: int) -> str:
    """Return the name of a block in a format's name: "channel" for whole rows, or such as "g128" for groups of 128 columns."""
    return "channel" if wide >= columns else f"g{wide}"
