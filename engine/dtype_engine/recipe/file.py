"""Recipe files: YAML made to be read, edited and compared by people."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from ..errors import UserError
from .rules import Recipe, Rule

VERSION = 1
_KEYS = {"version", "model", "rules"}


def read_recipe(path: Path) -> Recipe:
    """Read a recipe file. Raises UserError that names the file, and the rule where one is to blame."""
    try:
        data: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"can't read the recipe {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not a recipe: it is not text") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark else ""
        raise UserError(f"{path} is not a recipe: no valid YAML{where}") from None
    if not isinstance(data, dict) or not isinstance(data.get("rules"), list):
        raise UserError(f"{path} is not a recipe: it needs 'version: {VERSION}' and a list of 'rules'")
    if data.get("version") != VERSION:
        raise UserError(
            f"{path}: recipe version {data.get('version')!r} is unknown; this program reads version {VERSION}"
        )
    if unknown := set(map(str, data)) - _KEYS:
        raise UserError(f"{path}: unknown entry {sorted(unknown)[0]!r}; a recipe has {', '.join(sorted(_KEYS))}")
    return Recipe(tuple(_rule(path, number, entry) for number, entry in enumerate(data["rules"], 1)))


def _rule(path: Path, number: int, entry: object) -> Rule:
    if not isinstance(entry, dict) or set(entry) != {"pattern", "dtype"}:
        raise UserError(f"{path}: rule {number} needs just 'pattern' and 'dtype'")
    try:
        return Rule.make(str(entry["pattern"]), str(entry["dtype"]))
    except UserError as error:
        raise UserError(f"{path}: rule {number}: {error}") from None


def write_recipe(recipe: Recipe, model: str | None = None) -> str:
    """The text of a recipe file: one line a rule, in order."""
    lines = [f"version: {VERSION}"]
    if model:
        lines.append(f"model: {_scalar(model)}")
    lines.append("rules:" if recipe.rules else "rules: []")
    lines += [f"  - {{pattern: {_scalar(rule.pattern)}, dtype: {rule.dtype}}}" for rule in recipe.rules]
    return "\n".join(lines) + "\n"


def _scalar(text: str) -> str:
    """A string as YAML, always in double quotes: patterns are full of characters that mean something to YAML."""
    return yaml.safe_dump(text, default_style='"', allow_unicode=True, width=1 << 20).strip()
