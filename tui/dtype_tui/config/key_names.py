"""Names of keys and of their actions, for the help, the palette and the configuration file."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby

from textual.binding import Binding, BindingType
from textual.keys import format_key

_KEY_CAPS = {"enter": "Enter", "backspace": "Backspace", "pageup": "PgUp", "pagedown": "PgDn"}
"""Labels as printed on a keyboard, for keys that Textual shows otherwise."""


def with_ids(bindings: Iterable[Binding]) -> list[BindingType]:
    """Return the bindings with ids, which the configuration file uses. A binding without an id gets the `name_of` its action."""
    return [dataclasses.replace(binding, id=binding.id or name_of(binding.action)) for binding in bindings]


def name_of(action: str) -> str:
    """Return the binding id for an action, such as `match-previous` for `match(-1)` and `speed` for `ask('speed')`."""
    words = action.removeprefix("app.").removeprefix("screen.").removeprefix("ask")
    words = words.replace("(-1)", "_previous").replace("(1)", "_next")
    return re.sub(r"[^A-Za-z0-9]+", "-", words).strip("-")


def described(bindings: Iterable[BindingType], chosen: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (keys, description) of every binding, and of neighbors with one description together, such as `↓, ↑`, or `1 to 8` for
    digits. chosen: the user's own keys, by binding id.
    """
    listed = [binding for binding in bindings if isinstance(binding, Binding)]
    for description, alike in groupby(listed, lambda binding: binding.description):
        keys = [on_keyboard(key) for binding in alike for key in keys_of(binding, chosen).split(",")]
        digits = len(keys) > 2 and "".join(keys).isdigit()
        yield f"{keys[0]} to {keys[-1]}" if digits else ", ".join(keys), description


def keys_of(binding: Binding, chosen: Mapping[str, str]) -> str:
    """Return the keys of a binding, separated by commas. chosen: the user's own keys, by binding id."""
    return chosen.get(binding.id or "", binding.key)


def on_keyboard(key: str) -> str:
    """Return the label on the keyboard for Textual's name of a key: `Ctrl+r` for `ctrl+r`, `/` for `slash`."""
    parts = [_KEY_CAPS.get(part) or format_key(part) for part in key.strip().split("+")]
    return "+".join(part[0].upper() + part[1:] if len(part) > 1 and part.isalpha() else part for part in parts)
