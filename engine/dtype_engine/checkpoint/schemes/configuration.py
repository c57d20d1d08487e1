"""Reads what config.json declares about quantization, and tells which of its entries apply to a module."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from dtype_engine.core.errors import PatternError, TooSlow, UserError
from dtype_engine.core.regexes import compile_regex, limited
from dtype_engine.core.text import printable

_LARGEST = 2**31 - 1
"""The largest number that settings may declare. No tensor has as many rows or columns."""
_LONGEST_REGEX = 10_000
_ALWAYS_ENTRIES, _ENTRIES_PER_TENSOR = 100_000, 4
"""How many modules the settings may list. A tensor may hold hundreds of experts, each of which is listed as a module."""
_MOST_OF_ONE_MODULE = 100
"""The most entries in the settings of a single module."""
_MOST_GROUPS = 1_000
_DEEPEST = 4


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
    """Return a number that a configuration declares, such as a number of rows, or None if it is not a positive integer
    below 2^31.
    """
    return value if type(value) is int and 0 < value <= _LARGEST else None


def sizes(value: object) -> tuple[int, int] | None:
    """Return the (rows, columns) of a block that a configuration declares as [128, 128] or "128x128", or None for other values."""
    if isinstance(value, str):
        words = value[:20].split("x")
        value = [int(word) if word.isdecimal() else 0 for word in words]
    if not isinstance(value, list) or len(value) != 2 or size(value[0]) is None or size(value[1]) is None:
        return None
    return value[0], value[1]


class Targets:
    """Finds the entries of settings that apply to a module: its name, names in which `*` stands for any text, and `re:` with a
    regular expression for the beginning of its name. Others apply to no module.
    """

    def __init__(self, entries: Iterable[object]) -> None:
        self._names: dict[str, int] = {}
        self._patterns: list[tuple[int, str, Callable[[str], bool]]] = []
        for place, entry in enumerate(entries):
            if not isinstance(entry, str):
                continue
            if entry.startswith("re:") or "*" in entry:
                if (pattern := _compiled(entry)) is not None:
                    self._patterns.append((place, entry, pattern))
            else:
                self._names[entry] = place

    def of(self, module: str) -> list[str]:
        """Return the entries that apply to a module, in their order. Raises TooSlow."""
        found = [(place, entry) for place, entry, matches in self._patterns if matches(module)]
        found += [(self._names[module], module)] if module in self._names else []
        return [entry for _, entry in sorted(found)]


def _compiled(pattern: str) -> Callable[[str], bool] | None:
    """Return a function that tells whether a module's name matches, or None for an invalid regular expression. Raises TooSlow."""
    try:
        if pattern.startswith("re:"):
            return compile_regex(pattern.removeprefix("re:"), pattern, "match", dotall=False, longest=_LONGEST_REGEX)
        return limited(".*".join(map(re.escape, pattern.split("*"))), pattern, dotall=False)
    except TooSlow:
        raise
    except PatternError:
        return None


class _Same:
    """A part of the settings as a key of a cache: it equals itself alone, so that its content need not be compared."""

    def __init__(self, part: Any) -> None:
        self.part = part

    def __hash__(self) -> int:
        return id(self.part)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.part is other.part


@lru_cache(64)
def _targets(listed: _Same) -> Targets:
    return Targets(listed.part)


def refuse_many_entries(settings: object, where: str, tensors: int) -> None:
    """Raise UserError if quantization settings list far more modules, in one list or in all together, than a model of so many
    tensors has. where: the file that has the settings.
    """
    most_modules, together = _ALWAYS_ENTRIES + _ENTRIES_PER_TENSOR * tensors, 0
    for key, value in _lists(settings):
        most = _MOST_GROUPS if key == "config_groups" else most_modules
        if len(value) > most:
            listed = f"{printable(str(key), 60)} of the quantization settings has {len(value):,} entries"
            raise UserError(f"{where}: {listed}, and beside {tensors:,} tensors at most {most:,} are read")
        together += _modules_in(value)
        if together > most_modules:
            raise UserError(
                f"{where}: the lists of the quantization settings have over {most_modules:,} entries together, and no more are "
                f"read beside {tensors:,} tensors"
            )


def _lists(settings: object, depth: int = _DEEPEST) -> Iterator[tuple[object, Mapping[str, Any] | list[Any]]]:
    """Yield (key, value) of the lists and mappings in settings. depth: how many mappings inside of each other are looked into."""
    for key, value in mapping(settings).items():
        if isinstance(value, (Mapping, list)):
            yield key, value
            if depth:
                yield from _lists(value, depth - 1)


def _modules_in(listed: Mapping[str, Any] | list[Any]) -> int:
    """Return how many modules a list or mapping may name. A short mapping has the settings of one module."""
    if isinstance(listed, list):
        return sum(isinstance(entry, str) for entry in listed)
    return len(listed) if len(listed) > _MOST_OF_ONE_MODULE else 0


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
    return list(_declared_values(_Same(settings), key))


@lru_cache(64)
def _declared_values(settings: _Same, key: str) -> list[object]:
    modules = (module for key in ("dynamic", "extra_config") for module in mapping(settings.part.get(key)).values())
    return [place[key] for place in map(mapping, (settings.part, *modules)) if key in place]


def declared_numbers(settings: Mapping[str, Any], key: str) -> set[int]:
    """Return those of the `declared_values` under a key that are integers of at most 31 bits."""
    return {number for number in declared_values(settings, key) if type(number) is int and abs(number) <= _LARGEST}


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
    groups = map(mapping, mapping(settings.get("config_groups")).values())
    return [(targets_of(group), mapping(group.get(key))) for group in groups]


def targets_of(group: Mapping[str, Any]) -> list[object]:
    """Return the names, patterns and classes of modules in a group of compressed-tensors."""
    targets = group.get("targets")
    return targets if isinstance(targets, list) else []


def is_target(targets: list[object], module: str) -> bool:
    """Return whether one of the targets of a group applies to a module. Each list is compiled once. Raises TooSlow."""
    return bool(targets) and bool(_targets(_Same(targets)).of(module))


def block_in(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the (rows, columns) of the blocks that share a scale, which are 128 x 128 unless config.json declares others."""
    settings = declared(config)
    groups = (weights.get("block_structure") for _, weights in reversed(config_groups(settings, "weights")))
    found = next(filter(None, groups), settings.get("weight_block_size"))
    return (sizes(found) if isinstance(found, list) else None) or (128, 128)
