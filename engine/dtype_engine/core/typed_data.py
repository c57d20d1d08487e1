"""Validates data from JSON, YAML or callers in Python against the types of a class before it is used."""

from __future__ import annotations

import re
import typing
from collections.abc import Collection, Iterable
from operator import index
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from dtype_engine.core.errors import UserError
from dtype_engine.core.suggest import nearest
from dtype_engine.core.text import printable
from dtype_engine.core.user_folders import expanded

T = TypeVar("T")
_WHERE = re.compile(r"(?s)(.*) - at `(?:key` in `)?\$\.?(.*)`$")
_REFUSED = (msgspec.DecodeError, ValueError, OverflowError, RecursionError)
"""What msgspec raises for no JSON, another type, half a surrogate pair, or what is nested too deep."""


def as_type(data: object, kind: type[T]) -> T:
    """Convert `data` (mappings, lists, strings, numbers) to `kind`: a msgspec.Struct, a dataclass, or a container of these.

    Types must match, but an integer may become a float, a string a Path or a time (ISO 8601), and a list a tuple. Raises
    UserError, which names the entry: `options.prompts[1]: expected str, got int`.
    """
    try:
        return msgspec.convert(data, kind, dec_hook=path_of)
    except _REFUSED as error:
        raise _refusal(error) from None


def json_as_type(content: bytes, kind: type[T]) -> T:
    """Convert JSON to `kind`, as `as_type` does, but without making dictionaries, which take several times as much memory."""
    try:
        return msgspec.json.decode(content, type=kind, dec_hook=path_of)
    except _REFUSED as error:
        raise _refusal(error) from None


def _refusal(error: Exception) -> UserError:
    if not isinstance(error, msgspec.ValidationError):
        return UserError(printable(str(error), 120))
    found = _WHERE.match(str(error))
    said, where = found.groups() if found else (str(error), "")
    said = said.replace("`", "")
    said = re.sub(r"str matching regex '\^\((.*)\)\\+Z'", lambda found: f"one of {found[1].replace('|', ', ')}", said)
    said = printable(said[:1].lower() + said[1:], 120)
    return UserError(f"{printable(where, 80)}: {said}" if where else said)


class TypedFields:
    """The base class of a dataclass that callers make: a field of the wrong type or out of range raises UserError at once. Its
    `repr` has the fields that are not the defaults.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        kind = type(self)
        for name, field in _types(kind).items():
            try:
                given = getattr(self, name)
                if hasattr(given, "__index__") and not isinstance(given, int):
                    given = index(given)  # an integer of numpy
                value = msgspec.convert(given, field, dec_hook=path_of)
            except _REFUSED as error:
                raise UserError(f"{kind.__name__}.{name}{_in_python(_refusal(error).sentence, field)}") from None
            object.__setattr__(self, name, value)  # the class is frozen

    def __repr__(self) -> str:
        plain = type(self)()
        named = ((name, getattr(self, name)) for name in _types(type(self)))
        given = (f"{name}={value!r}" for name, value in named if value != getattr(plain, name))
        return f"{type(self).__name__}({', '.join(given)})"


_known: dict[Any, dict[str, Any]] = {}


def _types(kind: Any) -> dict[str, Any]:
    if kind not in _known:  # it takes 0.3 ms for all options
        _known[kind] = typing.get_type_hints(kind, include_extras=True)
    return _known[kind]


def _in_python(sentence: str, field: Any) -> str:
    """Return what msgspec says about a value, in words of Python and after a colon. field: the type that was expected."""
    where, colon, said = sentence.rpartition("]: ")
    for word, name in (("null", "None"), ("array", "a tuple"), ("object", getattr(field, "__name__", "dict"))):
        said = re.sub(rf"\b{word}\b", name, said)
    if said.startswith("invalid enum value"):
        said = f"expected one of {', '.join(map(str, literals(field)))}, got {said.rpartition(' ')[2]}"
    return f"{where}{colon}{said}".replace("[...]", "") if colon else f": {said}"


def literals(field: Any) -> list[object]:
    """Return the values that a type allows by `Literal`, in any part of it."""
    if typing.get_origin(field) is typing.Literal:
        return list(typing.get_args(field))
    return [value for part in typing.get_args(field) for value in literals(part)]


def refuse_unknown(what: str, names: Iterable[object], known: Collection[str]) -> None:
    """Raise UserError for the first of `names` that is not in `known`. what: what the names are, such as "option"."""
    for name in names:
        if name not in known:
            near = nearest(str(name), known)
            hint = f"did you mean {near}?" if near else f"there are {', '.join(known)}"
            raise UserError(f"unknown {what} {printable(str(name), 60)}; {hint}")


def as_plain(data: object) -> Any:
    """Convert a struct or dataclass to plain JSON types. Paths become absolute, as the result may be read in another folder."""
    return msgspec.to_builtins(data, enc_hook=_path_text)


def path_of(kind: type, value: object) -> Path:
    """Convert a string to a Path, as msgspec's `dec_hook`. A Path stays. Raises ValueError for another `kind` or value."""
    if kind is Path and isinstance(value, Path):
        return value
    if kind is not Path or not isinstance(value, str):
        raise ValueError(f"expected a path, got {type(value).__name__}")
    return Path(value)


def _path_text(value: object) -> str:
    """Convert a Path to a string, as msgspec's `enc_hook`."""
    if not isinstance(value, Path):
        raise NotImplementedError
    return str(expanded(value).absolute())
