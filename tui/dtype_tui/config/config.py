"""The configuration file: `config.yaml` in the user's configuration folder (`$XDG_CONFIG_HOME/dtype-tui`).

    theme: high-contrast        # any of Textual's themes, or high-contrast
    ascii: auto                 # always, never; auto looks at the locale
    keys: {cast: "c", measure: "f5"}
    defaults: {device: cpu, sequences: 8}

`keys` takes the names of the command line's commands (`:` and Tab show them), `defaults` the options of `dtype-tui`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import platformdirs

from dtype_engine.core.errors import UserError
from dtype_engine.core.regular_files import read_regular
from dtype_engine.core.suggest import nearest
from dtype_engine.core.text import printable

_LARGEST = 100_000
ASCII_CHOICES = ("auto", "always", "never")


@dataclass(frozen=True)
class Config:
    """What the file says; all of it may be missing."""

    theme: str | None = None
    ascii: str = "auto"
    keys: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)


def config_path() -> Path:
    """Where the file is looked for."""
    return Path(platformdirs.user_config_path("dtype-tui", appauthor=False)) / "config.yaml"


def read_config(actions: Iterable[str], themes: Iterable[str], options: Iterable[str]) -> Config:
    """The user's configuration, checked against the names of actions, themes and options that there are.

    Raises UserError, which names the file, the entry and what it could have been.
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
    from dtype_engine.core.plain_yaml import load_yaml  # most people have no such file, and it takes a while

    try:
        found = load_yaml(text)
    except UserError as error:
        raise UserError(f"{path}: not YAML: {error}") from None
    if found is None:
        return Config()
    if not isinstance(found, dict):
        raise UserError(f"{path}: must hold names and values, such as `theme: high-contrast`")
    _known(path, "setting", found, ("theme", "ascii", "keys", "defaults"))
    theme, ascii_choice = found.get("theme"), found.get("ascii", "auto")
    if theme is not None:
        _known(path, "theme", (theme,), tuple(themes))
    if ascii_choice not in ASCII_CHOICES:
        raise UserError(f"{path}: ascii: {_shown(ascii_choice)} is none of {', '.join(ASCII_CHOICES)}")
    keys, defaults = (_mapping(path, name, found.get(name)) for name in ("keys", "defaults"))
    _known(path, "key's action", keys, tuple(actions))
    for action, key in keys.items():
        if not isinstance(key, str) or not key.strip():
            raise UserError(
                f'{path}: keys: {_shown(action)}: {_shown(key)} is no key; write it as text, such as "f5" or "ctrl+s"'
            )
    twice = {key for key in keys.values() if list(keys.values()).count(key) > 1}
    if twice:
        raise UserError(f"{path}: keys: {_shown(', '.join(sorted(twice)))} is given to more than one action")
    _known(path, "default", defaults, tuple(options))
    return Config(theme, ascii_choice, keys, defaults)


def _mapping(path: Path, name: str, value: object) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError(f"{path}: {name}: must hold names and values, not {_shown(value)}")
    return value


def _known(path: Path, what: str, names: Iterable[object], known: tuple[str, ...]) -> None:
    for name in names:
        if name not in known:
            near = nearest(str(name), known)
            raise UserError(
                f"{path}: unknown {what} {_shown(name)}; "
                + (f"did you mean {near}?" if near else f"there are {', '.join(known)}")
            )


def _shown(value: object) -> str:
    return printable(str(value), 60)
