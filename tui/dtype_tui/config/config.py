"""The configuration file: `config.yaml` in the user's configuration folder (`$XDG_CONFIG_HOME/dtype-tui`).

    theme: high-contrast        # dtype-light, high-contrast, or any of Textual's themes
    ascii: auto                 # always, never; auto looks at the locale
    fold: true                  # false: every layer has a row of its own in the tree
    keys: {cast: "c", measure: "f5"}
    defaults: {device: cpu, sequences: 8}

`keys` maps the commands of the `:` line (Tab lists them) to keys. `defaults` maps options of `dtype-tui` to values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from dtype_engine.core.errors import UserError
from dtype_engine.core.regular_files import read_regular
from dtype_engine.core.text import printable
from dtype_engine.core.user_folders import config_folder

_LARGEST = 100_000
_LONGEST_KEY = 40
ASCII_CHOICES = ("auto", "always", "never")


class Config(msgspec.Struct, frozen=True):
    """The settings in the configuration file, or their defaults."""

    theme: str | None = None
    """None for the app's dark theme or, with 16 colors, the terminal's own colors."""
    ascii: str = "auto"
    """One of `ASCII_CHOICES`."""
    keys: Mapping[str, str] = msgspec.field(default_factory=dict)
    """The user's keys by binding id, such as {"measure": "f5"}."""
    defaults: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """Values of command-line options, by the option's name without dashes, not yet converted by click."""
    fold: bool = True
    """Whether neighboring modules that are alike share one row of the tree at first."""


def config_path() -> Path:
    return config_folder() / "config.yaml"


def read_config(actions: Iterable[str], themes: Iterable[str], options: Iterable[str]) -> Config:
    """Return the user's configuration, or the defaults if there is no file. actions, themes, options: the valid names. Raises
    UserError, which names the file, the entry and the nearest valid name.
    """
    path = config_path()
    try:
        text = read_regular(path, _LARGEST).decode()
    except FileNotFoundError:
        return Config()
    except OSError as error:
        raise UserError(f"{path}: can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: can't be read: it is not text") from None
    from dtype_engine.core.plain_yaml import load_yaml  # imported late: it is slow, and most users have no such file

    try:
        return _checked(load_yaml(text), list(actions), list(themes), list(options))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _checked(found: object, actions: list[str], themes: list[str], options: list[str]) -> Config:
    from dtype_engine.core.typed_data import refuse_unknown

    given = _mapping("this file", found)
    refuse_unknown("setting", given, ("theme", "ascii", "fold", "keys", "defaults"))
    theme, ascii_choice, fold = given.get("theme"), given.get("ascii", "auto"), given.get("fold", True)
    if theme is not None:
        refuse_unknown("theme", (theme,), themes)
    if ascii_choice not in ASCII_CHOICES:
        raise UserError(f"ascii: {_shown(ascii_choice)} is none of {', '.join(ASCII_CHOICES)}")
    if not isinstance(fold, bool):
        raise UserError(f"fold: {_shown(fold)} is neither true nor false")
    keys, defaults = _mapping("keys", given.get("keys")), _mapping("defaults", given.get("defaults"))
    refuse_unknown("key's action", keys, actions)
    for action, key in keys.items():
        if not isinstance(key, str) or not all(map(_is_key, key.split(","))):
            raise UserError(f'keys: {action}: {_shown(key)} is no key; write it as text, such as "f5" or "ctrl+s"')
    twice = {key for key in keys.values() if list(keys.values()).count(key) > 1}
    if twice:
        raise UserError(f"keys: {_shown(', '.join(sorted(twice)))} is given to more than one action")
    refuse_unknown("default", defaults, options)
    return Config(theme, ascii_choice, keys, defaults, fold)


def _mapping(what: str, value: object) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError(f"{what}: must hold names and values, not {_shown(value)}")
    return value


def _is_key(name: str) -> bool:
    """Return whether a text can name a key, such as "f5". Whether any terminal sends it is not checked."""
    return name.isprintable() and len(name.split()) == 1 and len(name) <= _LONGEST_KEY


def _shown(value: object) -> str:
    return printable(str(value), 60)
