"""Reads what config.json declares about quantization, and tells which of its entries apply to a module."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any


def declared(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the quantization settings in the content of config.json, or {} if it has none. Models that also take images have the
    settings under `text_config`. Old files of compressed-tensors call them `compression_config`.
    """
    for place in (config, config.get("text_config")):
        for key in ("quantization_config", "compression_config"):
            found = place.get(key) if isinstance(place, Mapping) else None
            if isinstance(found, Mapping):
                return found
    return {}


def size(value: object) -> int | None:
    """Return a number of rows or columns that a configuration declares. Returns None if the value is not a positive integer."""
    return value if type(value) is int and value > 0 else None


def sizes(value: object) -> tuple[int, int] | None:
    """Return the (rows, columns) of a block that a configuration declares: (128, 128) for [128, 128] or "128x128". Returns None for
    any other value.
    """
    pair = [int(word) if word.isdecimal() else 0 for word in value.split("x")] if isinstance(value, str) else value
    if not isinstance(pair, list) or len(pair) != 2 or size(pair[0]) is None or size(pair[1]) is None:
        return None
    return pair[0], pair[1]


def matches(pattern: object, module: str) -> bool:
    """Return whether a pattern matches the name of a module. A pattern is a full name, in which `*` matches any text, or `re:`
    and a regular expression that matches the beginning of the name.
    """
    if not isinstance(pattern, str):
        return False
    if not pattern.startswith("re:"):
        return re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), module) is not None
    try:
        return re.match(pattern.removeprefix("re:"), module) is not None
    except re.error:
        return False


def quant_method(settings: Mapping[str, Any]) -> str:
    """Return the declared `quant_method`, such as "gptq", or "" if there is none. Early versions of AutoRound wrote
    "intel/auto-round", for which this returns "auto-round".
    """
    return str(settings.get("quant_method") or "").removeprefix("intel/")


def declared_numbers(settings: Mapping[str, Any], key: str) -> set[int]:
    """Return all numbers that the quantization settings declare under a key, such as {4, 8} for "bits": the number for the whole
    model and the numbers for single modules. GPTQModel declares the latter in `dynamic`, AutoRound in `extra_config`.
    """
    found = [settings.get(key)]
    for overrides in (settings.get("dynamic"), settings.get("extra_config")):
        if isinstance(overrides, Mapping):
            found += [module.get(key) for module in overrides.values() if isinstance(module, Mapping)]
    return {number for number in found if type(number) is int}


def group_size(sizes: Iterable[int], columns: int, groups: int) -> int | None:
    """Return which of the declared group sizes divides a row of a weight into the given number of groups. The last group may be
    smaller. Returns None if no declared size does.

    sizes: the declared sizes, in columns. -1 means one group for the whole row. columns: the length of a row. groups: the number of
    groups in a row.
    """
    for each in sorted(sizes):
        wide = columns if each == -1 else each
        if min(columns, wide) > 0 and -(-columns // wide) == groups:
            return wide
    return None


def block_name(wide: int, columns: int) -> str:
    """Return the part of a format's name that tells the group size: "channel" if a group is a whole row, otherwise such as "g128"
    for groups of 128 columns. wide: the number of columns of a group. columns: the length of a row.
    """
    return "channel" if wide >= columns else f"g{wide}"


def config_groups(settings: Mapping[str, Any], key: str) -> list[tuple[list[object], Mapping[str, Any]]]:
    """Return (the targets of a group, its settings under `key`) for each group of compressed-tensors' `config_groups`. The targets
    are names, patterns and classes of modules. The settings are {} if the group has none. settings: the quantization settings.
    """
    groups = settings.get("config_groups")
    found = []
    for group in groups.values() if isinstance(groups, Mapping) else ():
        if isinstance(group, Mapping):
            targets, own = group.get("targets"), group.get(key)
            found.append((targets if isinstance(targets, list) else [], own if isinstance(own, Mapping) else {}))
    return found


def block_in(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the (rows, columns) of the blocks that share a scale, which are 128 x 128 unless the content of config.json declares
    others.
    """
    settings = declared(config)
    groups = (weights.get("block_structure") for _, weights in reversed(config_groups(settings, "weights")))
    found = next(filter(None, groups), settings.get("weight_block_size"))
    return (sizes(found) if isinstance(found, list) else None) or (128, 128)
