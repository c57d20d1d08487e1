"""Parses the budget, dtypes and constraints that the user types for a search."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass, field

from dtype_engine.core import dtypes
from dtype_engine.core.bandwidth import DEVICES, device_named
from dtype_engine.core.errors import UserError
from dtype_engine.core.kv_formats import SCANNED, names_caches, names_states_alone, parse_format, parse_scanned
from dtype_engine.core.text import printable
from dtype_engine.search.families import FAMILIES
from dtype_engine.search.pareto import Constraints

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12} | {
    f"{letter}{i}": 2 ** (10 * power) for power, letter in enumerate("kmgt", 1) for i in ("", "i", "ib")
}
_BUDGETS = ("budget", "active")
"""The words of lines that limit a size. One replaces the other."""
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*|%)\s*")


def parse_bytes(text: str, whole: int) -> int:
    """Parse a size in bytes: `12GiB`, `500MB`, `4096`, or a percentage such as `45%` of the size `whole`. Raises UserError."""
    size_and_unit = _SIZE.fullmatch(text)
    if size_and_unit is None or (size_and_unit[2] != "%" and size_and_unit[2].lower() not in _UNITS):
        raise UserError(f"can't read the budget {printable(text)!r}: write a size like 12GiB, 500MB or 45%")
    size = float(size_and_unit[1]) * (whole / 100 if size_and_unit[2] == "%" else _UNITS[size_and_unit[2].lower()])
    if not math.isfinite(size):
        raise UserError(f"the budget {printable(text)} is larger than any model")
    return int(size)


def parse_bandwidth(text: str) -> float:
    """Parse a memory bandwidth, such as `3.35TB/s`, or the name of a device of `bandwidth.DEVICES`, to bytes per second. Raises
    UserError.
    """
    if (device := device_named(text)) is not None:
        return device.gigabytes_per_s * 1e9
    size_and_unit = _SIZE.fullmatch(text.strip().removesuffix("/s"))
    if size_and_unit is None or size_and_unit[2].lower() not in _UNITS or not text.strip().endswith("/s"):
        raise UserError(
            f"can't read the bandwidth {printable(text)!r}: write a number like 3.35TB/s, or one of {', '.join(DEVICES)}"
        )
    found: float = float(size_and_unit[1]) * _UNITS[size_and_unit[2].lower()]
    if not 1 <= found <= 1e18:
        raise UserError(f"the bandwidth {printable(text)} is none of a memory: write a number like 3.35TB/s")
    return found


def parse_dtypes(text: str) -> tuple[str, ...]:
    """Parse a list such as `bf16,fp8,kv:fp8` (`kv:` marks a format of KV caches) to full names of dtypes. Raises UserError."""
    return tuple(parse_scanned(part) for part in text.split(",") if part.strip())


def parse_allowed(text: str) -> tuple[str, tuple[str, ...]]:
    """Parse a constraint `PATTERN=DTYPE,DTYPE` to (pattern, full names of the dtypes that it allows). Raises UserError."""
    pattern, equals, names = text.rpartition("=")
    if not equals or not pattern or not names:
        raise UserError(f"can't read {text!r}: write PATTERN=DTYPE,DTYPE")
    if names_caches(pattern) or names_states_alone(pattern):
        parsed = (parse_format(name) if name.strip() != dtypes.STORED else None for name in names.split(","))
        return pattern, tuple(dtypes.STORED if form is None else SCANNED + form for form in parsed)
    return pattern, parse_dtypes(names)


@dataclass(frozen=True)
class SearchConstraints:
    """The user's requirements for the recipe that a search finds. `lines` is the text that the user typed."""

    constraints: Constraints = field(default_factory=Constraints)
    budget: int | None = None
    """The maximum size in bytes, of the kind `constraints.by`."""
    lines: tuple[str, ...] = ()

    def with_line(self, line: str, stored_bytes: int, active_bytes: int | None = None) -> SearchConstraints:
        """Return a copy with one more typed line applied. A line is `keep PATTERN`, `alike PATTERN`, `only DTYPES`,
        `only PATTERN=DTYPES`, `formats NAME` with a name in `FAMILIES`, a budget such as `8MiB`, `45%` or `budget 8MiB`,
        `active SIZE` for a budget of what a token reads, or `clear`, which removes all requirements. Raises UserError for any other
        line. stored_bytes: the size of the stored model. active_bytes: what a token reads of it, or None if that is unknown.
        """
        if _SIZE.fullmatch(line):
            line = f"budget {line}"
        word, _, rest = line.strip().partition(" ")
        rest, known = rest.strip(), self.constraints
        if word == "clear" and not rest:
            return SearchConstraints()
        if word not in ("keep", "alike", "only", "formats", *_BUDGETS) or not rest:
            raise UserError(
                "write a size (8MiB, 45%), active SIZE, keep PATTERN, alike PATTERN, only DTYPES, formats NAME, or clear"
            )
        replaced = _BUDGETS if word in _BUDGETS else ("formats",) if word == "formats" else ()
        others = (other for other in self.lines if other.partition(" ")[0] not in replaced)
        lines = (*others, f"{word} {rest}")
        if word == "budget":
            return SearchConstraints(dataclasses.replace(known, by="bytes"), parse_bytes(rest, stored_bytes), lines)
        if word == "active":
            if active_bytes is None:
                raise UserError("it is unknown which weights of this model a token reads")
            return SearchConstraints(dataclasses.replace(known, by="active"), parse_bytes(rest, active_bytes), lines)
        if word == "formats":
            if rest not in FAMILIES:
                raise UserError(f"unknown formats {printable(rest)!r}: use one of {', '.join(FAMILIES)}")
            known = dataclasses.replace(known, formats=rest)
        elif word == "keep":
            known = dataclasses.replace(known, keep=(*known.keep, rest))
        elif word == "alike":
            known = dataclasses.replace(known, groups=(*known.groups, rest))
        elif "=" in rest:
            known = dataclasses.replace(known, only=(*known.only, parse_allowed(rest)))
        else:
            known = dataclasses.replace(known, dtypes=parse_dtypes(rest))
        return SearchConstraints(known, self.budget, lines)
