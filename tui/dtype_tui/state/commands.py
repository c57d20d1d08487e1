"""The command line's words: `cast *.mlp bf16`, `go model.layers.3`, `theme high-contrast`; and what completes them.

What a key does without further words is a command under its action's name, so the two can't come apart.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dtype_engine.core import dtypes
from dtype_engine.core.errors import UserError
from dtype_engine.core.suggest import nearest
from dtype_engine.core.text import printable
from dtype_tui.config.key_names import name_of

MOST_COMPLETIONS = 200
PATHS = ("folder", "file")
"""Kinds of arguments that are one path, spaces and all."""
WITH_PATHS = (*PATHS, "line")
"""These, and what is words or paths."""


@dataclass(frozen=True)
class Command:
    """A word, what follows it (kinds of `Completer`), and the app's action that gets these as strings."""

    name: str
    action: str
    arguments: tuple[str, ...] = ()
    meaning: str = ""
    needs: int | None = None
    """How many arguments there must be; all of them where this is None."""

    @property
    def usage(self) -> str:
        least = len(self.arguments) if self.needs is None else self.needs
        words = [kind.upper() if index < least else f"[{kind.upper()}]" for index, kind in enumerate(self.arguments)]
        return " ".join((self.name, *words))


CHECK = "Check the model's files: parts, scales, dtypes, what is missing"
WITH_ARGUMENTS = (
    Command("cast", "cast_as", ("pattern", "dtype"), "Cast what a pattern takes"),
    Command("filter", "filter_by", ("text",), "Show only names with this in them; alone: show all", 0),
    Command("go", "go_to", ("node",), "Go to a node by its name"),
    Command("sort", "sort_by", ("order",), "Children in this order"),
    Command("columns", "show_columns", ("columns",), "Show these columns; alone: show all", 0),
    Command("theme", "use_theme", ("theme",), "Colours"),
    Command("export", "export_to", ("folder",), "Write a checkpoint in the planned dtypes"),
    Command("recipe", "save_recipe_to", ("file",), "Write the rules, and what was measured"),
    Command("report", "save_report_to", ("file",), "Write a report, .html or .md"),
    Command("preset", "use_preset", ("preset",), "Put a preset in force, in place of all rules"),
    Command("check", "check_files", (), CHECK),
    Command("inputs", "inputs", ("line",), "Run on a prompt, or on a file; alone: show the current inputs", 0),
)
"""Commands that no key does: most take words after them."""


def all_commands(actions: Iterable[tuple[str, str]]) -> dict[str, Command]:
    """Every command by name: those above, and the keys' actions (name, description)."""
    by_name = {
        name_of(action): Command(name_of(action), action, (), text) for action, text in actions if "(" not in action
    }
    return by_name | {command.name: command for command in WITH_ARGUMENTS}


def parse(line: str, commands: dict[str, Command]) -> tuple[Command, tuple[str, ...]]:
    """The command of a line and its arguments. The last argument takes the rest of the line, spaces and all.

    Raises UserError: no such command, or too few or too many words.
    """
    name, _, rest = line.strip().removeprefix(":").strip().partition(" ")
    command = commands.get(name)
    if command is None:
        near = nearest(name, commands)
        raise UserError(
            f"no command {printable(name, 40)!r}" + (f"; did you mean {near}?" if near else "; Tab shows all")
        )
    rest = rest.strip()
    if not command.arguments:
        if rest:
            raise UserError(f"{command.name} takes no words after it")
        return command, ()
    arguments = tuple(rest.split(None, len(command.arguments) - 1)) if rest else ()
    if command.name == "cast" and len(arguments) == 1 and "=" in arguments[0]:
        arguments = tuple(part.strip() for part in arguments[0].rpartition("=")[::2])
    if len(arguments) < (len(command.arguments) if command.needs is None else command.needs):
        raise UserError(f"write {command.usage}")
    return command, arguments


@dataclass(frozen=True)
class Completer:
    """What may stand in each place of a line. Functions, since the tree, the cursor and the themes change."""

    commands: dict[str, Command]
    names: Callable[[], Sequence[str]]
    patterns: Callable[[], Sequence[str]]
    choices: Callable[[str], Sequence[str]]
    """Words of the kinds that are neither a name nor a file: order, columns, theme, preset, ..."""

    def __call__(self, line: str) -> list[str]:
        """Whole lines that begin as this one does, the likeliest first."""
        words = line.split(" ")
        if len(words) == 1:
            return [name for name in sorted(self.commands) if name.startswith(words[0])]
        command = self.commands.get(words[0])
        if command is None or not command.arguments:
            return []
        index = min(len(words) - 2, len(command.arguments) - 1)
        first = index + 1 if command.arguments[index] in PATHS else len(words) - 1
        before, begun = " ".join(words[:first]), " ".join(words[first:])
        return [f"{before} {word}" for word in self._words(command.arguments[index], begun)][:MOST_COMPLETIONS]

    def _words(self, kind: str, begun: str) -> list[str]:
        if kind == "dtype":
            words = [*map(dtypes.short_name, dtypes.CASTABLE_DTYPES), dtypes.STORED]
            return [word for word in words if word.startswith(begun)]
        if kind in WITH_PATHS:
            return _paths(begun, only_folders=kind == "folder")
        if kind in ("pattern", "node"):
            general = [pattern for pattern in self.patterns() if pattern.startswith(begun)] if kind == "pattern" else []
            return list(dict.fromkeys((*general, *_next_parts(self.names(), begun))))
        return [word for word in self.choices(kind) if word.startswith(begun)]


def _next_parts(names: Sequence[str], begun: str) -> list[str]:
    """Names one part further than what is typed: `model.la` gives `model.layers`, `model.layers.` its children."""
    length = len(begun)
    parts: dict[str, None] = {}
    for name in names:
        if name.startswith(begun):
            end = name.find(".", length + 1) if length else name.find(".")
            parts[name if end < 0 else name[:end]] = None
            if len(parts) >= MOST_COMPLETIONS:
                break
    parts.pop(begun, None)
    parts.pop("", None)
    return list(parts)


def _paths(begun: str, only_folders: bool = False) -> list[str]:
    """Paths that begin so, folders with a slash at the end; no hidden ones until their dot is typed."""
    head = begun[: begun.rfind("/") + 1]
    last = begun[len(head) :]
    try:
        with os.scandir(Path(head).expanduser()) as entries:
            names = [
                entry.name + ("/" if entry.is_dir() else "")
                for entry in entries
                if entry.name.startswith(last) and entry.name.isprintable()
            ]
    except (OSError, RuntimeError):  # not there, not readable; ~ of nobody
        return []
    return [
        head + name
        for name in sorted(names)
        if (name.endswith("/") or not only_folders) and (last.startswith(".") or not name.startswith("."))
    ]
