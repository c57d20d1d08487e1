"""Style sheets of Textual that are parsed once in a process.

Each app parses the styles of all of its widgets when it starts, and goes through all of them again with each widget of a new class,
which is a tenth of the time of a short test. What comes out depends on the text and on the theme's variables alone, and nothing
changes it afterwards.
"""

from __future__ import annotations

from typing import Any

from textual.css.model import RuleSet
from textual.css.stylesheet import Stylesheet

_parse = Stylesheet.parse
_parse_rules = Stylesheet._parse_rules
_whole: dict[Any, list[RuleSet]] = {}
_parsed: dict[Any, list[RuleSet]] = {}


def share() -> None:
    """Share parsed style sheets in this process from now on."""
    Stylesheet.parse = _whole_once  # type: ignore[method-assign]
    Stylesheet._parse_rules = _once  # type: ignore[method-assign]


def _whole_once(sheet: Stylesheet) -> None:
    if sheet._invalid_css:
        _parse(sheet)
        return
    key = (*sheet.source.items(), *sheet._variables.items())
    if key not in _whole:
        _parse(sheet)
        _whole[key] = sheet._rules
    sheet._rules, sheet._rules_map, sheet._require_parse = _whole[key], None, False


def _once(sheet: Stylesheet, css: str, *arguments: Any, **named: Any) -> list[RuleSet]:
    key = (css, arguments, *named.items(), *sheet._variables.items())
    if key not in _parsed:
        _parsed[key] = _parse_rules(sheet, css, *arguments, **named)
    return _parsed[key]
