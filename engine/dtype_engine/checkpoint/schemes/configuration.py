"""Reads what config.json declares about quantization, and tells which of its entries apply to a module."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def declared(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the quantization settings in the content of config.json, or {}. Models that also take images have them under
    `text_config`, and old files of compressed-tensors call them `compression_config`.
    """
    for place in (config, mapping(config.get("text_config"))):
        for key in ("quantization_config", "compression_config"):
            if isinstance(found := place.get(key), Mapping):
                return found
    return {}


def mapping(value: object) -> Mapping[str, Any]:
    """Return a value if it is a mapping, otherwise {}."""
    return value if isinstance(value, Mapping) else {}


def size(value: object) -> int | None:
    """Return a number that a configuration declares, such as a number of rows, or None if it is not a positive integer."""
    return value if type(value) is int and value > 0 else None


def sizes(value: object) -> tuple[int, int] | None:
    """Return the (rows, columns) of a block that a configuration declares as [128, 128] or "128x128", or None for other values."""
    pair = [int(word) if word.isdecimal() else 0 for word in value.split("x")] if isinstance(value, str) else value
    if not isinstance(pair, list) or len(pair) != 2 or size(pair[0]) is None or size(pair[1]) is None:
        return None
    return pair[0], pair[1]


def matches(pattern: object, module: str) -> bool:
    """Return whether a module's name matches a pattern: a name in which `*` stands for any text, or `re:` and a regular expression
    for the beginning of the name.
    """
    if not isinstance(pattern, str):
        return False
    if not pattern.startswith("re:"):
        return re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), module) is not None
    try:
        return re.match(pattern.removeprefix("re:"), module) is not None
    except re.error:
        return False


def ends_of(module: str) -> Iterator[str]:
    """Yield a dotted name and its shorter ends: "a.b.c", "b.c" and "c" for "a.b.c"."""
    while module:
        yield module
        module = module.partition(".")[2]


def quant_method(settings: Mapping[str, Any]) -> str:
    """Return the declared `quant_method`, such as "gptq". Early versions of AutoRound wrote "intel/auto-round" for "auto-round"."""
    return str(settings.get("quant_method") or "").removeprefix("intel/")


def declared_values(settings: Mapping[str, Any], key: str) -> list[object]:
    """Return all values under a key, including those for single modules in `dynamic` (GPTQModel) or `extra_config` (AutoRound)."""
    modules = (module for key in ("dynamic", "extra_config") for module in mapping(settings.get(key)).values())
    return [place[key] for place in map(mapping, (settings, *modules)) if key in place]


def declared_numbers(settings: Mapping[str, Any], key: str) -> set[int]:
    """Return those of the `declared_values` under a key that are integers."""
    return {number for number in declared_values(settings, key) if type(number) is int}


def group_size(sizes: Iterable[int], columns: int, groups: int) -> int | None:
    """Return the first of the group sizes (-1: a whole row) that splits `columns` columns into `groups` groups, or None. The last
    group may be smaller.
    """
    for each in sorted(sizes):
        wide = columns if each == -1 else each
        if min(columns, wide) > 0 and -(-columns // wide) == groups:
            return wide
    return None


def block_name(wide: int, columns: int) -> str:
    """Return the name of a group, such as "g128", or "channel" for a whole row. wide: a group's columns. columns: a row's."""
    return "channel" if wide >= columns else f"g{wide}"


def config_groups(settings: Mapping[str, Any], key: str) -> list[tuple[list[object], Mapping[str, Any]]]:
    """Return a pair for each group of compressed-tensors: (names, patterns and classes of modules; settings under `key`)."""
    found = []
    for group in map(mapping, mapping(settings.get("config_groups")).values()):
        targets = group.get("targets")
        found.append((targets if isinstance(targets, list) else [], mapping(group.get(key))))
    return found


def block_in(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the (rows, columns) of the blocks that share a scale, which are 128 x 128 unless config.json declares others."""
    settings = declared(config)
    groups = (weights.get("block_structure") for _, weights in reversed(config_groups(settings, "weights")))
    found = next(filter(None, groups), settings.get("weight_block_size"))
    return (sizes(found) if isinstance(found, list) else None) or (128, 128)
