"""Style sheets of Textual that are parsed once in a process.

Each app parses the styles of all of its widgets when it starts, which is a twentieth of the time of a short test. What comes out
depends on the text and on the theme's variables alone, and nothing changes it afterwards.
"""

from __future__ import annotations

from typing import Any

from textual.css.model import RuleSet
from textual.css.stylesheet import Stylesheet

_parse = Stylesheet._parse_rules
_parsed: dict[Any, list[RuleSet]] = {}


def share() -> None:
    """Share parsed style sheets in this process from now on."""
    Stylesheet._parse_rules = _once  # type: ignore[method-assign]


def _once(sheet: Stylesheet, css: str, *arguments: Any, **named: Any) -> list[RuleSet]:
    key = (css, arguments, *named.items(), *sheet._variables.items())
    if key not in _parsed:
        _parsed[key] = _parse(sheet, css, *arguments, **named)
    return _parsed[key]
