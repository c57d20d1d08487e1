"""Validates data from JSON or YAML against the types of a class before the data is used."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from dtype_engine.core.errors import UserError
from dtype_engine.core.suggest import nearest
from dtype_engine.core.text import printable

T = TypeVar("T")
_WHERE = re.compile(r"(?s)(.*) - at `(?:key` in `)?\$\.?(.*)`$")


def as_type(data: object, kind: type[T]) -> T:
    """Convert `data` (mappings, lists, strings, numbers) to `kind`: a msgspec.Struct, a dataclass, or a container of these.

    Values keep their types, with these exceptions: an integer may become a float, a string may become a Path or a time (ISO 8601),
    and a list may become a tuple. Raises UserError, which names the entry: `options.prompts[1]: expected str, got int`.
    """
    try:
        return msgspec.convert(data, kind, dec_hook=path_of)
    except msgspec.ValidationError as error:
        found = _WHERE.match(str(error))
        said, where = found.groups() if found else (str(error), "")
        said = said.replace("`", "")
        said = printable(said[:1].lower() + said[1:], 120)
        raise UserError(f"{printable(where, 80)}: {said}" if where else said) from None
    except (ValueError, OverflowError, RecursionError) as error:  # half a surrogate pair, or nested too deep
        raise UserError(printable(str(error), 120)) from None


def refuse_unknown(what: str, names: Iterable[object], known: Collection[str]) -> None:
    """Raise UserError for the first of `names` that is not in `known`.

    The message suggests the nearest known name, or lists all known names if none is near. what: what the names are, for the
    message, such as "option".
    """
    for name in names:
        if name not in known:
            near = nearest(str(name), known)
            hint = f"did you mean {near}?" if near else f"there are {', '.join(known)}"
            raise UserError(f"unknown {what} {printable(str(name), 60)}; {hint}")


def as_plain(data: object) -> Any:
    """Convert a struct or dataclass, including nested ones, to plain JSON types.

    Paths become absolute, because the result may be read from another working directory.
    """
    return msgspec.to_builtins(data, enc_hook=_path_text)


def path_of(kind: type, value: object) -> Path:
    """Convert a string to a Path. msgspec calls this function as its `dec_hook`.

    Raises ValueError if `kind` is not Path or `value` is not a string.
    """
    if kind is not Path or not isinstance(value, str):
        raise ValueError(f"expected a path, got {type(value).__name__}")
    return Path(value)


def _path_text(value: object) -> str:
    """Convert a Path to a string. msgspec calls this function as its `enc_hook`, which must raise NotImplementedError for any value
    that is not a Path.
    """
    if not isinstance(value, Path):
        raise NotImplementedError
    return str(value.expanduser().absolute())
